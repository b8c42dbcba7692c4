"""A handle on a worker in another process, and what is said when it is gone."""

from __future__ import annotations

from typing import Any, Protocol


class WorkerLost(RuntimeError):
    """The process behind a worker died, hung, or cannot be reached. What it was doing may or may not have happened."""

    def __init__(self, name: str, reason: str):
        reason = reason.rstrip(".")  # Ray's are whole sentences, and become a part of ours
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class NodeLost(WorkerLost):
    """The node on which a worker was being started is gone: it may start on another."""


class SenderLost(WorkerLost):
    """What a call was handed by reference is gone, and with it whoever made it; the worker that was called is well."""


class NoWorkersError(RuntimeError):
    """Nobody is left to ask, and no other worker could be started in time."""


class TooManyFailures(RuntimeError):
    """More workers were lost than runtime.max_failures allows."""


class Failures:
    """Counts lost workers over a whole run, restarts of its gang included."""

    def __init__(self, most: int):
        self.most, self.lost = most, list[WorkerLost]()

    def __call__(self, lost: WorkerLost) -> None:
        """Raises TooManyFailures where one is too many."""
        self.lost.append(lost)
        if 0 <= self.most < len(self.lost):
            what = "1 worker was" if len(self.lost) == 1 else f"{len(self.lost)} workers were"
            reasons = "; ".join(str(lost) for lost in self.lost[-3:])
            raise TooManyFailures(
                f"{what} lost, more than runtime.max_failures={self.most} allows: {reasons}. "
                "Nothing that was committed is lost: resume=latest goes on"
            ) from lost


class Worker(Protocol):
    name: str

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method over there. Raises what it raises, and WorkerLost."""
        ...

    async def gone(self) -> WorkerLost:
        """Wait until it is lost, or was ended. Returns how."""
        ...

    def kill(self, reason: str = "was ended") -> None:
        """End its process at once; it counts as lost for this reason unless it was lost before."""
        ...


def reason_of(error: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
