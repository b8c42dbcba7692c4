"""Moves a version's weights from the training ranks to rollout workers in other processes.

    Transport.pack(gang, version) -> Shipment, at rank 0 -> deliver(workers) -> what each confirmed, or how it was lost

    Store       through the object store: a node's workers read one copy in shared memory
    Collective  by broadcast, in flat buckets: between nodes and GPUs, without a stop

In one process nothing moves: the engine computes on the learner's own weights, without a transport.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plaudit.runtime.ray_gang import RayGang
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, Worker, WorkerLost
from plaudit.weights.collective import AbsentError, CollectiveError, Invitation, NotHeldError
from plaudit.weights.parcel import Parcel, WeightsError

Outcome = tuple[int, str] | WeightsError | WorkerLost
"""Version and digest that a worker confirmed, why it refused the weights, or how it was lost."""


class Shipment(Protocol):
    """Weights of one version, held where they were trained until there are newer ones. The caller promises workers
    whose `load(attempt, ...)` takes them, and to replace lost workers. The implementer promises an outcome for each
    worker, in their order, whatever happens to the others. It raises other errors of `load`, and SenderLost if the
    weights are gone."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]: ...


class Holder(Protocol):
    async def load(self, attempt: int, sent: Parcel | Invitation) -> tuple[int, str]: ...


class Giver(Protocol):
    """A training rank, as far as its weights go. Digests are "" except at rank 0."""

    def parcel(self, version: int) -> tuple[Parcel | None, str]: ...

    def hold(self, version: int, device: str) -> str: ...

    async def meet(self) -> str: ...

    async def send(self, invitation: Invitation) -> None: ...

    async def dissolve(self, invitation: Invitation) -> None: ...


class Transport(Protocol):
    async def pack(self, ranks: RayGang[Giver], version: int) -> Shipment:
        """Pack the policy's present weights. Each rank takes part, since it may hold a share of them."""
        ...


def transport_of(settings: RuntimeSettings, *, gpus: bool) -> Transport:
    """Choose the transport. `gpus`: each rank and rollout worker has its own GPU, which NCCL needs; settings refuse it
    otherwise."""
    if settings.weights == "store":
        return Store()
    automatic = "nccl" if gpus else "gloo"
    backend = automatic if settings.backend == "auto" else settings.backend
    return Collective(backend=backend, timeout=settings.collective_timeout)


class Store:
    """Put rank 0's parcel into the object store and give workers a reference."""

    async def pack(self, ranks: RayGang[Giver], version: int) -> Shipment:
        parcel, digest = await ranks.keep(Giver.parcel, version)
        return Stored(parcel, version, digest)


@dataclass(frozen=True)
class Stored:
    """A `Shipment`: a parcel, or a reference to one."""

    parcel: Any
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        found = await asyncio.gather(
            *(worker.call(Holder.load, attempt, self.parcel) for worker in workers), return_exceptions=True
        )
        return [_outcome(one) for one in found]


class Collective:
    """Broadcast from rank 0 to all workers, and to those that join later."""

    def __init__(self, *, backend: str, timeout: float):
        self.backend, self._timeout = backend, timeout
        self._numbers = itertools.count()
        self._members: tuple[Worker[Any], ...] = ()
        self._group = (0, "")
        self._one_at_a_time = asyncio.Lock()

    async def pack(self, ranks: RayGang[Giver], version: int) -> Shipment:
        device = "cuda" if self.backend == "nccl" else "cpu"
        digest, *_ = await ranks.each(Giver.hold, version, device)
        return Broadcast(self, ranks.first, version, digest)

    async def deliver(
        self, sender: Worker[Giver], version: int, workers: Sequence[Worker[Holder]], attempt: int
    ) -> list[Outcome]:
        """Deliver in as many rounds as needed: in each, all remaining workers get the weights, or one is lost."""
        found: dict[Worker[Holder], Outcome] = {}
        async with self._one_at_a_time:
            while left := [worker for worker in workers if worker not in found]:
                found |= await self._round(sender, version, left, attempt)
        return [found[worker] for worker in workers]

    async def _round(
        self, sender: Worker[Giver], version: int, workers: list[Worker[Holder]], attempt: int
    ) -> dict[Worker[Holder], Outcome]:
        """Takes: a sender and workers. Waits for: all of them. Woken by: them, or the first failure, after which no
        worker waits for an absent one. Gives: the workers that have the weights and those that are lost, nothing for
        others that failed."""
        calls: list[asyncio.Future[Any]] = []
        try:
            first, *others = await self._invited(sender, version, workers)
            asked: list[Coroutine[Any, Any, Any]] = [sender.call(Giver.send, first)]
            asked += [worker.call(Holder.load, attempt, mine) for worker, mine in zip(workers, others, strict=True)]
            sending, *loading = calls = [asyncio.ensure_future(one) for one in asked]
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            absent = self._absent(sending, workers)
            for worker in absent:
                worker.kill(self._late)
            if sending.done() and sending.exception() is None:
                await asyncio.wait(calls)  # all have the weights: some end the answers that they are at first
            elif waiting:
                await sender.call(Giver.dissolve, first)
                # Members that have arrived wait no longer than this (see `Receiver`).
                _, waiting = await asyncio.wait(calls, timeout=2 * self._timeout)
                late = [worker for worker, call in zip(workers, loading, strict=True) if call in waiting]
                for worker in late:
                    worker.kill(self._late)
                absent += late
                await asyncio.wait(calls)
            if isinstance(sending.exception(), WorkerLost | NotHeldError):
                sending.result()
        except (WorkerLost, NotHeldError) as gone:
            raise SenderLost(sender.name, str(gone)) from gone
        finally:
            await _over(calls)
        if sending.exception() is None and not any(call.exception() for call in loading):
            self._members = (sender, *workers)
        return self._settled(workers, [call.exception() or call.result() for call in loading], absent)

    async def _invited(self, sender: Worker[Giver], version: int, workers: list[Worker[Holder]]) -> list[Invitation]:
        """Invite to the last group if it has the same members, else to a new one."""
        members = (sender, *workers)
        if members != self._members:
            self._group = next(self._numbers), await sender.call(Giver.meet)
        self._members = ()  # unless all goes well
        number, address = self._group
        common = len(members), version, self.backend, self._timeout
        return [Invitation(address, number, rank, *common) for rank in range(len(members))]

    @property
    def _late(self) -> str:
        return f"did not come for the weights within {self._timeout:g} s (runtime.collective_timeout)"

    def _absent(self, sending: asyncio.Future[Any], workers: list[Worker[Holder]]) -> list[Worker[Holder]]:
        error = sending.exception() if sending.done() else None
        return [workers[rank - 1] for rank in error.args[0]] if isinstance(error, AbsentError) else []

    def _settled(
        self, workers: list[Worker[Holder]], found: list[Any], absent: list[Worker[Holder]]
    ) -> dict[Worker[Holder], Outcome]:
        """If some workers failed and none is known to be lost, count those that failed as lost."""
        told = dict(zip(workers, found, strict=True))
        failed = [worker for worker in workers if isinstance(told[worker], CollectiveError)]
        settled = {worker: _outcome(told[worker]) for worker in workers if worker not in failed}
        for worker in absent:
            settled[worker] = WorkerLost(worker.name, self._late)
        if not any(isinstance(outcome, WorkerLost) for outcome in settled.values()):
            for worker in failed:
                reason = f"a broadcast of weights failed ({told[worker]})"
                worker.kill(reason)
                settled[worker] = WorkerLost(worker.name, reason)
        return settled


@dataclass(frozen=True)
class Broadcast:
    """A `Shipment` that rank 0 holds and sends on request."""

    transport: Collective
    sender: Worker[Giver]
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        return await self.transport.deliver(self.sender, self.version, workers, attempt)


async def _over(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel calls whose results and errors are no longer needed."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def _outcome(found: Any) -> Outcome:
    """Return a worker's outcome; raise any other error."""
    if isinstance(found, BaseException):
        if isinstance(found, SenderLost) or not isinstance(found, WeightsError | WorkerLost):
            raise found
        return found
    return tuple(found)
