"""A plain worker inside a Ray actor, and the handle on it.

    RayWorker.call -> Host.call (in the actor) -> the worker's method -> its result, its own exception, or WorkerLost

A worker's sync methods run one after another in one thread, its coroutines on an event loop. Both may be busy for a
whole step, so another thread answers heartbeats. A process that gives no sign in time is killed and counts as lost. So
does a process that Ray reports as ended. One process of each node vouches for its neighbours (`Hearts`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, overload

import ray
from ray import exceptions

from plaudit.runtime import beats, stage
from plaudit.runtime.died import last_lines, reason, stderr_path
from plaudit.runtime.local import do
from plaudit.runtime.plain import dumps, is_plain, loads
from plaudit.runtime.ray_node import kill_process, on_node, this_node
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import AnswersLost, Arguments, Kind_co, Result, SenderLost, WorkerLost, reason_of

LOST = (
    exceptions.ActorDiedError,
    exceptions.ActorUnavailableError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ActorUnschedulableError,
)
GONE = (*LOST, exceptions.ObjectLostError)
"""Ray's errors for a lost process or a lost object (a call's result, or the object of a reference in its arguments)."""
CALL_TIMEOUT = 3600.0
"""Most seconds of one call, far above any healthy one (a prompt's answers, an update's gradients, a save). Heartbeats
and collectives detect dead or hung processes sooner; this ends work that never finishes in a process that answers."""
ASKED, NODE = 5.0, "its node is gone"
"""Most seconds to ask a node for a dead process's last lines, for which the loss waits; the reason of a lost node."""
HEART = "heart"
"""Name of the actor's concurrency group for heartbeats, which has an event loop of its own."""


class Host:
    """The actor around a plain worker."""

    def __init__(self, folder: str, make: Callable[..., Any], *arguments: Any):
        if Path(folder).is_dir():
            os.chdir(folder)  # relative paths in settings then mean the same as in the driver
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._make = partial(make, *arguments)
        self._worker: Any = None

    async def about(self) -> tuple[int, str, str]:
        """Return this process's id, its node, and the path of its stderr there."""
        return os.getpid(), this_node(), stderr_path()

    async def build(self) -> None:
        """Make the worker in the thread of its methods."""
        self._worker = await asyncio.get_running_loop().run_in_executor(self._thread, self._make)
        beats.begin(this_node())

    async def stage(self) -> str:
        return stage.now()

    async def ping(self) -> None:
        stage.check()

    async def vouch(self, processes: Sequence[int], within: float) -> list[int]:
        """As `ping`; return the ids among `processes`, on this node, with a heartbeat in the last `within` seconds."""
        stage.check()
        return beats.fresh(this_node(), processes, within)

    async def call_plain(self, asked: bytes) -> bytes:
        method, arguments = loads(asked)
        return dumps(await self.call(None, method, *arguments))

    async def call(self, part: str | None, method: str, *arguments: Any) -> Any:
        if part is None and inspect.iscoroutinefunction(function := getattr(self._worker, method)):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(_done, self._worker, part, method, *arguments))


def _done(worker: Any, part: str | None, method: str, *arguments: Any) -> Any:
    """As `do`. A SystemExit would end the actor's event loop, and no call would return."""
    try:
        return do(worker, part, method, *arguments)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit({error.code})") from error


class RayWorker(Generic[Kind_co]):
    """A `Worker` in another process. `start` makes it ready; `Hearts` then asks it for signs."""

    def __init__(
        self, name: str, actor: Any, settings: RuntimeSettings, *, say: Callable[[str], None] = lambda text: None
    ):
        self.name, self._actor, self._say = name, actor, say
        self.heartbeat_timeout, self._call_timeout = settings.heartbeat_timeout, CALL_TIMEOUT
        self._start_timeout = settings.start_timeout
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pid, self.node, self._stderr = 0, "", ""
        self._told, self._killed = "", False
        self._asking: asyncio.Future[list[str]] | None = None  # for the last lines of its stderr
        self.processes = (self,)

    async def start(self, timeout: float) -> None:
        telling = asyncio.get_running_loop().create_task(self._tell())
        try:
            async with asyncio.timeout(timeout):
                self.pid, self.node, self._stderr = await _plain(self._asked(self._actor.about))
                await _plain(self._actor.build.remote())
                await self._tell_stage()  # the stage that it has reached since the last report
        except TimeoutError:
            self.kill()
            raise WorkerLost(self.name, f"was not ready within {timeout:g} s (runtime.start_timeout)") from None
        except LOST as error:
            raise WorkerLost(self.name, await self._cause(error)) from error
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        """Ask for the worker's stage (`stage.py`) every second and report changes, until cancelled."""
        with contextlib.suppress(exceptions.RayError):
            while True:
                await self._tell_stage()
                await asyncio.sleep(1.0)

    async def _tell_stage(self) -> None:
        if (now := await _plain(self._asked(self._actor.stage))) != self._told:
            self._say(f"{self.name} {now}")
            self._told = now

    def _silent(self) -> str:
        return f"gave no sign for {self.heartbeat_timeout:g} s (runtime.heartbeat_timeout)"

    def _end(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        self._kill()

    @overload
    async def call(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, Result]], *arguments: *Arguments
    ) -> Result: ...
    @overload
    async def call(self, method: Callable[[Kind_co, *Arguments], Result], *arguments: *Arguments) -> Result: ...
    async def call(self, method: Callable[[Kind_co, *Arguments], Any], *arguments: *Arguments) -> Any:
        return await self.do(None, method.__name__, arguments, plain=is_plain(method))

    async def do(
        self, part: str | None, method: str, arguments: Sequence[Any], *, starts: bool = False, plain: bool = False
    ) -> Any:
        """Call a method of the worker, or of its `part`. `starts`: limit the call to runtime.start_timeout. `plain`:
        arguments and result are sent as one pickle each. Raises the method's exception, SenderLost or WorkerLost."""
        if self._lost.done():
            raise WorkerLost(self.name, self._lost.result())
        limit, timeout = "one call", self._call_timeout
        if starts:
            limit, timeout = "runtime.start_timeout", self._start_timeout
        asked = (dumps((method, arguments)),) if plain else (part, method, *arguments)
        call = self._actor.call_plain if plain else self._actor.call
        answer = await self._in_time(call.remote(*asked), timeout, f"did not end {method}", limit)
        found = await self._result(answer)
        return loads(found) if plain else found

    async def _result(self, answer: asyncio.Future[Any]) -> Any:
        """Return a call's result or raise its exception. If the result is lost, end the worker and raise WorkerLost."""
        try:
            return answer.result()
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, GONE):
                raise SenderLost("a sender", reason_of(error.cause)) from error
            raise error.cause from error  # the worker's own exception
        except GONE as error:
            self._end(await self._cause(error))
            raise WorkerLost(self.name, self._lost.result()) from error

    async def _cause(self, error: Exception) -> str:
        """Return the reason of a loss as text. If the process ended by itself, its node is asked for its last lines."""
        found = _cause(error)
        if not self._stderr or self._lost.done() or not isinstance(error, exceptions.ActorDiedError) or NODE in found:
            return found
        if self._asking is None:
            self._asking = asyncio.ensure_future(on_node(self.node, last_lines, self._stderr))
        try:
            async with asyncio.timeout(ASKED):
                return reason(await asyncio.shield(self._asking), str(error))
        except (TimeoutError, exceptions.RayError):
            return found

    async def _in_time(self, reference: Any, timeout: float, what: str, limit: str) -> asyncio.Future[Any]:
        """Wait for an object, return its future. After `timeout` s end the worker. Raises WorkerLost if it is lost."""
        answer = asyncio.ensure_future(_plain(reference))
        try:
            done, _ = await asyncio.wait((answer, self._lost), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()  # no effect on a finished one
        if not done:
            self._end(f"{what} within {timeout:g} s ({limit})")
        if not answer.done():
            raise WorkerLost(self.name, self._lost.result())
        return answer

    async def found(self) -> WorkerLost | None:
        """Ask the worker for a heartbeat now. Return the WorkerLost if it is lost, else None."""
        await self._sign(self._actor.ping)
        return WorkerLost(self.name, self._lost.result()) if self._lost.done() else None

    async def vouches(self, others: Sequence[RayWorker[Any]]) -> list[int]:
        """Ask the worker for a heartbeat. Return the process ids among `others`, on its node, that it vouches for."""
        lost = await self._sign(self._actor.vouch, [one.pid for one in others], self.heartbeat_timeout / 4)
        return lost or []

    async def _sign(self, method: Any, *arguments: Any) -> Any:
        """Return the worker's answer to a heartbeat. Without one in time, end the worker and return None."""
        if self._lost.done():
            return None
        try:
            return await self._asked_twice(method, *arguments)
        except TimeoutError:
            self._end(self._silent())
        except exceptions.RayTaskError as error:  # raised by `stage.check`
            self._end(reason_of(error.cause))
        except exceptions.RayError as error:
            self._end(await self._cause(error))
        return None

    async def _asked_twice(self, method: Any, *arguments: Any) -> Any:
        """Return the answer; TimeoutError after heartbeat_timeout. Ask again if this process stood still meanwhile."""
        loop, timeout = asyncio.get_running_loop(), self.heartbeat_timeout
        begun = loop.time()
        try:
            async with asyncio.timeout(timeout):
                return await _plain(self._asked(method, *arguments))
        except TimeoutError:
            if loop.time() - begun < 1.25 * timeout:
                raise
            async with asyncio.timeout(timeout):
                return await _plain(self._asked(method, *arguments))

    def _asked(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the actor, which answers while the worker is busy."""
        return method.options(concurrency_group=HEART).remote(*arguments)

    def references(
        self,
        method: Callable[[Any, *Arguments], Any],
        *arguments: *Arguments,
        parts: int,
        part: str | None = None,
    ) -> list[Any]:
        """Call a method of the worker, or of its `part`, that returns a tuple of `parts` values. Return a reference to
        each value without waiting. Other workers that get a reference fetch the value directly."""
        found: list[Any] = self._actor.call.options(num_returns=parts).remote(part, method.__name__, *arguments)
        return found

    async def fetched(self, reference: Any) -> Any:
        """Return the object of a reference that this worker made. Raises as `do` does."""
        answer = await self._in_time(reference, self._call_timeout, "returned nothing", "one call")
        return await self._result(answer)

    async def keep(
        self, method: Callable[[Kind_co, *Arguments], tuple[Any, Result]], *arguments: *Arguments
    ) -> tuple[Any, Result]:
        """Call a method that returns a pair. The first part stays in the worker: return a reference to it, and the
        second part itself."""
        first, second = self.references(method, *arguments, parts=2)
        return first, await self.fetched(second)

    async def call_apart(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, tuple[Any, Result]]], *arguments: *Arguments
    ) -> tuple[Stayed, Result]:
        reference, second = self.references(method, *arguments, parts=2)
        return Stayed(reference), await self.fetched(second)

    async def gone(self) -> WorkerLost:
        return WorkerLost(self.name, await asyncio.shield(self._lost))

    @property
    def alive(self) -> bool:
        """True unless the worker is known to be lost."""
        return not self._lost.done()

    def kill(self, reason: str = "was ended") -> None:
        self._end(reason)

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # the worker is being ended in any case
            ray.kill(self._actor)
        # A stopped process cannot receive a request; later its id may belong to another process.
        if self.pid and not self._killed:
            self._killed = True
            kill_process(self.pid, self.node)


class Stayed:
    """An object in Ray's store, on the node of the worker that made it. It outlives that worker, but not the node."""

    def __init__(self, reference: Any):
        self.reference = reference

    def all(self, stayed: Sequence[Stayed]) -> list[Any]:
        """Fetch and return the objects of `stayed`, in order. Raises AnswersLost if any is lost."""
        try:
            return list(ray.get([one.reference for one in stayed]))
        except GONE as error:
            raise AnswersLost("answers on a node", _cause(error)) from error


def _cause(error: Exception) -> str:
    """Return the reason of a loss as text: for a dead node the end of Ray's message, else its first line."""
    if isinstance(error, exceptions.ObjectLostError):
        return f"what it returned is lost ({type(error).__name__})"
    if isinstance(error, exceptions.ActorUnavailableError):  # its message has codes of Ray's calls
        return "its process cannot be reached, so it counts as lost"
    text = str(error)
    return f"{NODE} ({text.rpartition(': ')[2].strip()})" if "its node has died" in text else reason_of(error)


async def _plain(reference: Any) -> Any:
    """Make a coroutine of Ray's awaitable."""
    return await reference
