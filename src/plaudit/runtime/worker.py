"""A handle on a worker in another process, and the errors of its loss."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, TypeVarTuple, overload

from plaudit.support.errors import Ended

HOUR = 3600.0
"""Seconds over which lost workers are counted."""
Doing = Callable[..., AbstractContextManager[None]]
"""`with doing(worker, phase, turn=False):` records when a worker does something; `turn`: for a turn of an episode."""
Kind_co = TypeVar("Kind_co", covariant=True)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class WorkerLost(RuntimeError):
    """A worker's process died, hung, or cannot be reached. Its current call may or may not have taken effect."""

    def __init__(self, name: str, reason: str):
        reason = reason.rstrip(".")  # Ray's reasons end with a full stop; ours go on
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.reason)


class OutOfStep(Exception):
    """A pass failed in one of a worker's processes, so they are no longer at the same step: the worker is unusable."""


class NodeLost(WorkerLost):
    """The node on which a worker was starting is lost: the worker may start on another."""


class SenderLost(WorkerLost):
    """The object of a reference is lost with the process that made it; the called worker still works."""


class AnswersLost(SenderLost):
    """Answers that were still on the node that sampled them are lost with it. Its lost workers count separately."""


class NoWorkersError(Ended):
    """No worker is left, and no other could be started in time."""

    status = 5


class TooManyFailures(Ended):
    """More workers were lost within an hour than runtime.max_failures_per_hour allows."""

    status = 5


class Failures:
    """Count a run's lost workers, including those before its ranks restarted. A resumed run counts from 0."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic):
        """At most `most` workers may be lost within any HOUR; -1: any number. `clock` returns seconds."""
        self.most, self.lost = most, list[WorkerLost]()
        self._clock, self._times = clock, deque[float]()

    def __call__(self, lost: WorkerLost) -> None:
        """Count a lost worker. Raises TooManyFailures if there were too many within the last hour."""
        now = self._clock()
        self.lost.append(lost)
        self._times.append(now)
        while self._times[0] <= now - HOUR:
            self._times.popleft()
        count = len(self._times)
        if 0 <= self.most < count:
            what = "1 worker was" if count == 1 else f"{count} workers were"
            latest = Counter(str(lost) for lost in self.lost[-min(count, 3) :])
            reasons = "; ".join(f"{one} ({times} times)" if times > 1 else one for one, times in latest.items())
            raise TooManyFailures(
                f"{what} lost within an hour, more than runtime.max_failures_per_hour={self.most} allows: {reasons}."
            ) from lost


class Worker(Protocol[Kind_co]):
    """A handle on an object of this kind. Methods are given as those of its class, as in `call(Judge.of_sequences,
    texts)`: the type checker compares arguments and result with them, and only their names travel."""

    @property
    def name(self) -> str: ...

    @property
    def processes(self) -> Sequence[Worker[Kind_co]]:
        """Handles of this worker's processes, first the worker itself. If one process dies, the worker is lost."""
        ...

    @overload
    async def call(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, Result]], *arguments: *Arguments
    ) -> Result: ...
    @overload
    async def call(self, method: Callable[[Kind_co, *Arguments], Result], *arguments: *Arguments) -> Result:
        """Call a method of the worker. Raises the method's own exception, or WorkerLost."""
        ...

    async def call_apart(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, tuple[Any, Result]]], *arguments: *Arguments
    ) -> tuple[Any, Result]:
        """As `call`, for a method that returns a pair. The pair's first value stays on the worker's node; an object is
        returned for it whose `all` fetches it in any process."""
        ...

    async def gone(self) -> WorkerLost:
        """Wait until the worker is lost or was ended. Return the reason."""
        ...

    def kill(self, reason: str = "was ended") -> None:
        """Kill the worker's process or processes. It counts as lost for this reason, unless it was lost before."""
        ...


def reason_of(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
