"""The collective transport: ranks broadcast their weights in rounds, until each worker has them or is lost.

Collective.pack -> Broadcast, held by the ranks -> deliver: Invitation to every member -> Giver.send, Holder.load
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, Worker, WorkerLost
from plaudit.weights.changes import OtherBaseError
from plaudit.weights.collective import AbsentError, CollectiveError, Invitation, NotHeldError
from plaudit.weights.packed import PackReport
from plaudit.weights.transport import Giver, Holder, Outcome, Shipment, Store, Transport, outcome_of


def transport_of(settings: RuntimeSettings, *, gpus: bool) -> Transport:
    """Return the transport of `runtime.weights`. `gpus`: each rank and rollout worker has its own GPU, which NCCL needs
    (settings refuse backend=nccl otherwise); backend=auto is then NCCL, else gloo."""
    if settings.weights == "store":
        return Store()
    automatic = "nccl" if gpus else "gloo"
    backend = automatic if settings.backend == "auto" else settings.backend
    return Collective(backend=backend, timeout=settings.collective_timeout)


class Collective:
    """A `Transport`: each rank that has weights to send broadcasts them to all workers, and to later ones."""

    def __init__(self, *, backend: str, timeout: float):
        self.backend, self._timeout = backend, timeout
        self._numbers = itertools.count()
        self._members: tuple[Worker[Any], ...] = ()
        self._group = (0, "")
        self._one_at_a_time = asyncio.Lock()

    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
        device = "cuda" if self.backend == "nccl" else "cpu"
        reports = await ranks.each(Giver.hold, version, device)
        giving = [(rank, report) for rank, report in zip(ranks.workers, reports, strict=True) if report.parts]
        return Broadcast(self, tuple(rank for rank, _ in giving), version, [report for _, report in giving])

    async def deliver(
        self, givers: Sequence[Worker[Giver]], version: int, workers: Sequence[Worker[Holder]], attempt: int
    ) -> list[Outcome]:
        """Broadcast in rounds until each worker has an outcome. Workers that cannot apply changes get whole weights in
        further rounds. Return the outcomes; raise SenderLost if a giver is lost or no longer holds the version."""
        found: dict[Worker[Holder], Outcome] = {}
        async with self._one_at_a_time:
            for whole in (False, True):
                while left := [worker for worker in workers if worker not in found]:
                    found |= await self._round(givers, version, left, attempt, whole=whole)
                if not whole:
                    found = {worker: one for worker, one in found.items() if not isinstance(one, OtherBaseError)}
        return [found[worker] for worker in workers]

    async def _round(
        self, givers: Sequence[Worker[Giver]], version: int, workers: list[Worker[Holder]], attempt: int, *, whole: bool
    ) -> dict[Worker[Holder], Outcome]:
        """Takes: givers (ranks that send) and workers. Waits for: all their calls. Woken by: the end of a call; after a
        first failure, waiting members are released. Gives: an outcome for each worker that has the weights or is lost;
        none for the others, which failed."""
        calls: list[asyncio.Future[Any]] = []
        count = len(givers)
        try:
            invited = await self._invited(givers, version, workers, whole=whole)
            asked: list[Coroutine[Any, Any, Any]] = [
                *(giver.call(Giver.send, mine) for giver, mine in zip(givers, invited, strict=False)),
                *(one.call(Holder.load, attempt, mine) for one, mine in zip(workers, invited[count:], strict=True)),
            ]
            calls = [asyncio.ensure_future(one) for one in asked]
            sending, loading = calls[:count], calls[count:]
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            absent = self._absent(sending[0], [*givers, *workers])
            for one in absent:
                one.kill(self._late)
            if all(map(_sent, sending)):
                await asyncio.wait(calls)  # all have the weights; some let running answers end before they load them
            elif waiting:
                await givers[0].call(Giver.dissolve, invited[0])
                # Members that have arrived wait no longer than this (see `Receiver`).
                _, waiting = await asyncio.wait(calls, timeout=2 * self._timeout)
                late = [worker for worker, call in zip(workers, loading, strict=True) if call in waiting]
                for worker in late:
                    worker.kill(self._late)
                absent += late
                await asyncio.wait(calls)
        except WorkerLost as gone:
            raise SenderLost(gone.name, gone.reason) from gone
        finally:
            await _over(calls)
        for giver, call in zip(givers, sending, strict=True):
            error = call.exception()
            if giver in absent or isinstance(error, WorkerLost | NotHeldError):
                raise SenderLost(giver.name, self._late if giver in absent else str(error)) from call.exception()
        if not any(call.exception() for call in calls):
            self._members = (*givers, *workers)
        return self._settled(workers, [call.exception() or call.result() for call in loading], absent)

    async def _invited(
        self, givers: Sequence[Worker[Giver]], version: int, workers: list[Worker[Holder]], *, whole: bool
    ) -> list[Invitation]:
        """Return an invitation per member, givers first: to the last group if it has these members, else a new one."""
        members = (*givers, *workers)
        if members != self._members:
            self._group = next(self._numbers), await givers[0].call(Giver.meet)
        self._members = ()  # unless all goes well
        number, address = self._group
        common = len(members), len(givers), version, self.backend, whole, self._timeout
        return [Invitation(address, number, rank, *common) for rank in range(len(members))]

    @property
    def _late(self) -> str:
        return f"did not come for the weights within {self._timeout:g} s (runtime.collective_timeout)"

    def _absent(self, meeting: asyncio.Future[Any], members: list[Worker[Any]]) -> list[Worker[Any]]:
        error = meeting.exception() if meeting.done() else None
        return [members[rank] for rank in error.args[0]] if isinstance(error, AbsentError) else []

    def _settled(
        self, workers: list[Worker[Holder]], found: list[Any], absent: list[Worker[Holder]]
    ) -> dict[Worker[Holder], Outcome]:
        """Return the outcomes, except of workers that failed only because another was lost (they get another round).
        If some failed and none is known to be lost, kill those that failed and count them as lost."""
        outcomes = dict(zip(workers, found, strict=True))
        failed = [worker for worker in workers if isinstance(outcomes[worker], CollectiveError)]
        settled = {worker: outcome_of(outcomes[worker]) for worker in workers if worker not in failed}
        for worker in absent:
            settled[worker] = WorkerLost(worker.name, self._late)
        if not any(isinstance(outcome, WorkerLost) for outcome in settled.values()):
            for worker in failed:
                reason = f"a broadcast of weights failed ({outcomes[worker]})"
                worker.kill(reason)
                settled[worker] = WorkerLost(worker.name, reason)
        return settled


@dataclass(frozen=True)
class Broadcast:
    """A `Shipment` that ranks hold and send on request."""

    transport: Collective
    givers: tuple[Worker[Giver], ...]
    version: int
    reports: Sequence[PackReport]

    @property
    def digest(self) -> str:
        return self.reports[0].digest

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        return await self.transport.deliver(self.givers, self.version, workers, attempt)


def _sent(call: asyncio.Future[Any]) -> bool:
    return call.done() and call.exception() is None


async def _over(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel unfinished calls and wait for the end of all, ignoring errors."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
