"""Processes that are called as one: training ranks, as a worker group that names the rank at fault if a call fails, and
the processes of one rollout worker or judge. Left out: starting them, and reacting to a loss.

scatter: method, arguments of each rank -> RayWorker.do -> results in rank order, or the rank at fault
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

from plaudit.runtime.worker import Arguments, Kind_co, OutOfStep, Result, SenderLost, Worker, WorkerLost, reason_of
from plaudit.runtime.worker_group import WorkerGroup

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker

GRACE = 2.0
"""After a collective failed on one rank, it fails on all of its ranks within this many seconds."""


class RayWorkerGroup(WorkerGroup[Kind_co]):
    """Ranks in separate processes; rank 0 answers for all if one answer is enough."""

    def __init__(
        self, workers: Sequence[RayWorker[Kind_co]], *, patience: float = math.inf, width: int = 1, stages: int = 1
    ):
        """After a call failed on a rank, wait at most `patience` seconds to see whether a rank is lost. A rank without
        a heartbeat counts as lost after runtime.heartbeat_timeout."""
        self.workers, self.world, self.width, self.stages = tuple(workers), len(workers), width, stages
        self._patience = patience

    async def scatter(
        self,
        method: Callable[[Kind_co, *Arguments], Result],
        arguments: Sequence[tuple[*Arguments]],
        *,
        starts: bool = False,
    ) -> list[Result]:
        """As `WorkerGroup.scatter`. Raises WorkerLost for a lost rank. `starts`: limit the call to start_timeout."""
        pairs = zip(self.workers, arguments, strict=True)
        return await self._all([worker.do(self.name, method.__name__, mine, starts=starts) for worker, mine in pairs])

    async def _all(self, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return all results, or raise the first failure or the loss that caused it. Do not wait for other calls: ranks
        that wait for a lost one would end only at their time-out."""
        calls = [asyncio.ensure_future(call) for call in asked]
        try:
            return list(await asyncio.gather(*calls))
        except WorkerLost:
            raise
        except Exception as error:
            lost = await self._culprit(error, calls)
            if lost is None:
                raise
            raise lost from error

    async def _culprit(self, error: Exception, calls: Sequence[asyncio.Future[Any]]) -> WorkerLost | None:
        """Return the loss of the rank at fault: one found lost, or after a failed collective a stuck one, else the
        first that failed. Return None if the error is the rank's own, or there is only one rank."""
        if self.world == 1:
            return None
        lost = await self.lost()
        if lost is None and _of_collective(error):
            await asyncio.wait(calls, timeout=GRACE)
            pairs = list(zip(self.workers, calls, strict=True))
            stuck = next((worker for worker, call in pairs if not call.done()), None)
            if stuck is not None:
                return WorkerLost(stuck.name, f"it never came to a collective of the others ({reason_of(error)})")
            failed = next(worker for worker, call in pairs if call.exception())
            lost = WorkerLost(failed.name, f"a collective failed ({reason_of(error)})")
        return lost

    async def lost(self) -> WorkerLost | None:
        """Ask all ranks for a heartbeat. Return the WorkerLost of the first that is lost, or None."""
        asked = [asyncio.ensure_future(worker.found()) for worker in self.workers]
        done, late = await asyncio.wait(asked, timeout=None if math.isinf(self._patience) else self._patience)
        for sign in late:
            sign.cancel()
        return next((lost for sign in asked if sign in done and (lost := sign.result()) is not None), None)

    @property
    def first(self) -> RayWorker[Kind_co]:
        return self.workers[0]

    async def keep(
        self, method: Callable[[Kind_co, *Arguments], tuple[Any, Result]], *arguments: *Arguments
    ) -> list[tuple[Any, Result]]:
        """Call a method that returns a pair on every rank. Return [(reference to the first value, second value)]."""
        return await self._all([worker.keep(method, *arguments) for worker in self.workers])


class GroupWorker(Generic[Kind_co]):
    """A `Worker` of several processes. Calls go to the first; if any is lost, all are ended and the worker is lost."""

    def __init__(self, name: str, worker_group: RayWorkerGroup[Kind_co]):
        self.name, self.worker_group = name, worker_group
        self.processes: Sequence[Worker[Kind_co]] = (self, *worker_group.workers[1:])
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Takes: nothing. Waits for: the loss of a process. Woken by: it. Gives: nothing; other processes are ended."""
        gone = [asyncio.ensure_future(worker.gone()) for worker in self.worker_group.workers]
        try:
            await asyncio.wait(gone, return_when=asyncio.FIRST_COMPLETED)
            self._end(next(one.result() for one in gone if one.done()))
        finally:
            for one in gone:
                one.cancel()

    @overload
    async def call(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, Result]], *arguments: *Arguments
    ) -> Result: ...
    @overload
    async def call(self, method: Callable[[Kind_co, *Arguments], Result], *arguments: *Arguments) -> Result: ...
    async def call(self, method: Callable[[Kind_co, *Arguments], Any], *arguments: *Arguments) -> Any:
        return await self._answer(self.worker_group.first.call(method, *arguments))

    async def call_apart(
        self, method: Callable[[Kind_co, *Arguments], Coroutine[Any, Any, tuple[Any, Any]]], *arguments: *Arguments
    ) -> tuple[Any, Any]:
        found: tuple[Any, Any] = await self._answer(self.worker_group.first.call_apart(method, *arguments))
        return found

    async def _answer(self, asked: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await asked
        except WorkerLost as lost:
            self._end(lost)
        except OutOfStep as error:
            self._end(await self.worker_group.lost() or WorkerLost(self.name, reason_of(error)))
        raise WorkerLost(self.name, self._lost.result())

    async def gone(self) -> WorkerLost:
        return WorkerLost(self.name, await asyncio.shield(self._lost))

    def kill(self, reason: str = "was ended") -> None:
        self._end(WorkerLost(self.name, reason))

    def _end(self, lost: WorkerLost) -> None:
        """Count the worker as lost and end all of its processes."""
        if not self._lost.done():
            self._lost.set_result(lost.reason if lost.name == self.name else str(lost))
        for worker in self.worker_group.workers:
            worker.kill("was ended with the others")


class Abreast(GroupWorker[Kind_co]):
    """A `GroupWorker` whose processes all do each call, one call at a time, and meet in collectives."""

    def __init__(self, name: str, worker_group: RayWorkerGroup[Kind_co]):
        super().__init__(name, worker_group)
        self._turn = asyncio.Lock()

    async def call(self, method: Callable[[Kind_co, *Arguments], Any], *arguments: *Arguments) -> Any:
        async with self._turn:
            try:
                return (await self.worker_group.each(method, *arguments))[0]
            except SenderLost as lost:  # others may be waiting within a pass
                self._end(lost)
                raise
            except WorkerLost as lost:
                self._end(lost)
            except Exception as error:  # noqa: BLE001 - where it failed in one process, others may wait within a pass
                self._end(WorkerLost(self.name, f"its processes are out of step ({reason_of(error)})"))
        raise WorkerLost(self.name, self._lost.result())


def _of_collective(error: Exception) -> bool:
    """True for errors of a process group: torch's Dist... classes, or a RuntimeError that names gloo."""
    return type(error).__name__.startswith("Dist") or (type(error) is RuntimeError and "gloo" in str(error).lower())
