"""A plain worker inside a Ray actor, and the handle on it.

    RayWorker.call -> Host.call (there) -> the worker's method -> its result, its own exception, or WorkerLost

A worker's plain methods run one after another in one thread, its coroutines on an event loop, which they may hold for
as long as a step takes: heartbeats are answered from another. A process that gives no sign in time is killed and counts
as lost; so does one that Ray says has ended, for whatever reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from plaudit.runtime import stage
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, WorkerLost, reason_of

LOST = (
    exceptions.ActorDiedError,
    exceptions.ActorUnavailableError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ActorUnschedulableError,
)
GONE = (*LOST, exceptions.ObjectLostError, exceptions.OwnerDiedError)
"""What a call fails with where something that it was handed by reference is gone."""
HEART = "heart"
"""The group of calls that have an event loop of their own there."""


class Host:
    """The actor around a plain worker."""

    def __init__(self, folder: str, make: Callable[..., Any], *arguments: Any):
        if Path(folder).is_dir():
            os.chdir(folder)  # so that relative paths in settings mean what they mean to the driver
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._make = partial(make, *arguments)
        self._worker: Any = None

    async def build(self) -> tuple[int, str]:
        """Make the worker, in the thread that its methods will run in. Returns this process's id and node."""
        self._worker = await asyncio.get_running_loop().run_in_executor(self._thread, self._make)
        return await self.ping()

    async def stage(self) -> str:
        return stage.now()

    async def ping(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._worker, method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))


class RayWorker:
    """A `Worker` over there. `start` makes it ready and begins to listen for its heart."""

    def __init__(
        self, name: str, actor: Any, settings: RuntimeSettings, *, say: Callable[[str], None] = lambda text: None
    ):
        self.name, self._actor, self._say = name, actor, say
        self._heartbeat_timeout, self._call_timeout = settings.heartbeat_timeout, settings.call_timeout
        self._start_timeout = settings.start_timeout
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._heart: asyncio.Task[None] | None = None
        self.pid, self.node = 0, ""
        self._told = ""
        self._killed = False

    async def start(self, timeout: float) -> None:
        telling = asyncio.get_running_loop().create_task(self._tell())
        try:
            async with asyncio.timeout(timeout):
                self.pid, self.node = await _plain(self._actor.build.remote())
                await self._tell_stage()  # the last one
        except TimeoutError:
            self.kill()
            raise WorkerLost(self.name, f"was not ready within {timeout:g} s (runtime.start_timeout)") from None
        except LOST as error:
            raise WorkerLost(self.name, _cause(error)) from error
        finally:
            telling.cancel()
        self._heart = asyncio.get_running_loop().create_task(self._listen())

    async def _tell(self) -> None:
        """Say what it does until it is ready, where it tells."""
        with contextlib.suppress(exceptions.RayError):
            while True:
                await self._tell_stage()
                await asyncio.sleep(1.0)

    async def _tell_stage(self) -> None:
        if (now := await _plain(self._asked("stage"))) != self._told:
            self._say(f"{self.name} {now}")
            self._told = now

    async def _listen(self) -> None:
        """A sign every quarter of the time allowed."""
        while await self.found() is None:
            await asyncio.sleep(self._heartbeat_timeout / 4)

    def _silent(self) -> str:
        return f"gave no sign for {self._heartbeat_timeout:g} s (runtime.heartbeat_timeout)"

    def _end(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        self._kill()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self._answer(method, arguments, self._call_timeout, "runtime.call_timeout")

    async def begin(self, method: str, *arguments: Any) -> Any:
        """A call that is a part of starting, and has the time for that."""
        return await self._answer(method, arguments, self._start_timeout, "runtime.start_timeout")

    async def _answer(self, method: str, arguments: Sequence[Any], timeout: float, setting: str) -> Any:
        if self._lost.done():
            raise WorkerLost(self.name, self._lost.result())
        answer = asyncio.ensure_future(_plain(self._actor.call.remote(method, *arguments)))
        both, first = (answer, self._lost), asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(both, timeout=timeout, return_when=first)
        finally:
            answer.cancel()  # does nothing to what is done
        if not done:
            self._end(f"did not end {method} within {timeout:g} s ({setting})")
        if not answer.done():
            raise WorkerLost(self.name, self._lost.result())
        try:
            return answer.result()
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, GONE):
                raise SenderLost("a sender", reason_of(error.cause)) from error
            raise error.cause from error  # the worker's own exception
        except LOST as error:
            self._end(_cause(error))
            raise WorkerLost(self.name, _cause(error)) from error
        except GONE as error:
            raise SenderLost("a sender", reason_of(error)) from error

    async def found(self) -> WorkerLost | None:
        """Ask for a sign now. Returns how the worker was lost, if it was."""
        if not self._lost.done():
            try:
                await self._sign()
            except TimeoutError:
                self._end(self._silent())
            except exceptions.RayError as error:  # `ping` itself raises nothing
                self._end(_cause(error))
        return WorkerLost(self.name, self._lost.result()) if self._lost.done() else None

    async def _sign(self) -> None:
        """Raises TimeoutError where none comes. Where this process itself stood still meanwhile, it asks again."""
        loop, timeout = asyncio.get_running_loop(), self._heartbeat_timeout
        begun = loop.time()
        try:
            async with asyncio.timeout(timeout):
                await _plain(self._asked("ping"))
        except TimeoutError:
            if loop.time() - begun < 1.25 * timeout:
                raise
            async with asyncio.timeout(timeout):
                await _plain(self._asked("ping"))

    def _asked(self, method: str) -> Any:
        """What a method of the host says, whatever the worker does meanwhile."""
        return getattr(self._actor, method).options(concurrency_group=HEART).remote()

    def references(self, method: str, *arguments: Any, parts: int) -> list[Any]:
        """Call a method that returns a tuple, and get a reference to each of its parts: handed to other workers' calls,
        they go there directly."""
        found: list[Any] = self._actor.call.options(num_returns=parts).remote(method, *arguments)
        return found

    async def fetched(self, reference: Any) -> Any:
        """What a reference from here stands for."""
        timeout = self._call_timeout
        try:
            async with asyncio.timeout(timeout):
                return await _plain(reference)
        except TimeoutError:
            self._end(f"made nothing within {timeout:g} s (runtime.call_timeout)")
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except LOST as error:
            self._end(_cause(error))
        raise WorkerLost(self.name, self._lost.result())

    async def keep(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method that returns a pair: a reference to the first, which stays there, and the second itself."""
        first, second = self.references(method, *arguments, parts=2)
        return first, await self.fetched(second)

    async def gone(self) -> WorkerLost:
        return WorkerLost(self.name, await asyncio.shield(self._lost))

    @property
    def alive(self) -> bool:
        """As far as is known."""
        return not self._lost.done()

    def kill(self, reason: str = "was ended") -> None:
        self._end(reason)

    def _kill(self) -> None:
        if self._heart is not None and self._heart is not _current_task():
            self._heart.cancel()
        with contextlib.suppress(Exception):  # whatever is wrong with it, it is being ended
            ray.kill(self._actor)
        if self.pid and not self._killed:  # a stopped process hears no request; later its id may be another's
            self._killed = True
            _kill_process(self.pid, self.node)


def _cause(error: Exception) -> str:
    """Ray's first line says the same of every loss; the last one says what became of a node."""
    told = str(error)
    return f"its node is gone ({told.rpartition(': ')[2].strip()})" if "its node has died" in told else reason_of(error)


async def _plain(reference: Any) -> Any:
    """A coroutine of what Ray gives, which is awaitable but not one."""
    return await reference


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs any more
        return None


def _kill_process(pid: int, node: str) -> None:
    with contextlib.suppress(Exception):  # gone already, or its node is
        if node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(os.kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid, signal.SIGKILL)
