"""Moves a version's weights from the training ranks to rollout workers in other processes.

    Transport.pack(gang, version) -> Shipment, in parcels, one at each rank that gives some of the weights
             -> deliver(workers) -> what each confirmed, or how it was lost

    Store       through the object store: a node's workers read one copy in shared memory
    Collective  by broadcast, in flat buckets: between nodes and GPUs, without a stop

Every worker gets all parcels. In one process nothing moves: the engine computes on the learner's own weights, without a
transport.
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
    async def load(self, attempt: int, *sent: Parcel | Invitation) -> tuple[int, str]: ...


class Giver(Protocol):
    """A training rank, as far as its weights go. It gives them in parts: `parcel` returns one, with the digest of all
    ranks' parts and the number of its own; `hold` keeps all and returns the digest, "" if there are none."""

    def parcel(self, version: int, part: int) -> tuple[Parcel | None, tuple[str, int]]: ...

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
    """Put the ranks' parcels into the object store, a part of each at a time, and give workers references."""

    async def pack(self, ranks: RayGang[Giver], version: int) -> Shipment:
        parcels: list[Any] = []
        part = most = 0
        while part <= most:
            kept = await ranks.keep(Giver.parcel, version, part)
            parcels += [parcel for parcel, (_, parts) in kept if part < parts]
            most = max(parts for _, (_, parts) in kept) - 1
            part += 1
        digest = next(digest for _, (digest, parts) in kept if parts)
        return Stored(tuple(parcels), version, digest)


@dataclass(frozen=True)
class Stored:
    """A `Shipment`: parcels, or references to them."""

    parcels: tuple[Any, ...]
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        found = await asyncio.gather(
            *(worker.call(Holder.load, attempt, *self.parcels) for worker in workers), return_exceptions=True
        )
        return [_outcome(one) for one in found]


class Collective:
    """Broadcast from each rank that gives to all workers, and to those that join later."""

    def __init__(self, *, backend: str, timeout: float):
        self.backend, self._timeout = backend, timeout
        self._numbers = itertools.count()
        self._members: tuple[Worker[Any], ...] = ()
        self._group = (0, "")
        self._one_at_a_time = asyncio.Lock()

    async def pack(self, ranks: RayGang[Giver], version: int) -> Shipment:
        device = "cuda" if self.backend == "nccl" else "cpu"
        digests = await ranks.each(Giver.hold, version, device)
        giving = [(rank, digest) for rank, digest in zip(ranks.workers, digests, strict=True) if digest]
        return Broadcast(self, tuple(rank for rank, _ in giving), version, giving[0][1])

    async def deliver(
        self, givers: Sequence[Worker[Giver]], version: int, workers: Sequence[Worker[Holder]], attempt: int
    ) -> list[Outcome]:
        """Deliver in as many rounds as needed: in each, all remaining workers get the weights, or one is lost."""
        found: dict[Worker[Holder], Outcome] = {}
        async with self._one_at_a_time:
            while left := [worker for worker in workers if worker not in found]:
                found |= await self._round(givers, version, left, attempt)
        return [found[worker] for worker in workers]

    async def _round(
        self, givers: Sequence[Worker[Giver]], version: int, workers: list[Worker[Holder]], attempt: int
    ) -> dict[Worker[Holder], Outcome]:
        """Takes: givers and workers. Waits for: all of them. Woken by: them, or the first failure, after which no
        worker waits for an absent one. Gives: the workers that have the weights and those that are lost, nothing for
        others that failed."""
        calls: list[asyncio.Future[Any]] = []
        count = len(givers)
        try:
            invited = await self._invited(givers, version, workers)
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
                await asyncio.wait(calls)  # all have the weights: some end the answers that they are at first
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
        self, givers: Sequence[Worker[Giver]], version: int, workers: list[Worker[Holder]]
    ) -> list[Invitation]:
        """Invite to the last group if it has the same members, else to a new one."""
        members = (*givers, *workers)
        if members != self._members:
            self._group = next(self._numbers), await givers[0].call(Giver.meet)
        self._members = ()  # unless all goes well
        number, address = self._group
        common = len(members), len(givers), version, self.backend, self._timeout
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
    """A `Shipment` that ranks hold and send on request."""

    transport: Collective
    givers: tuple[Worker[Giver], ...]
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        return await self.transport.deliver(self.givers, self.version, workers, attempt)


def _sent(call: asyncio.Future[Any]) -> bool:
    return call.done() and call.exception() is None


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
