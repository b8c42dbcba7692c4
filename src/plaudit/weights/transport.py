"""How a version's weights get from the training ranks to rollout workers in other processes.

    Transport.pack(gang, version) -> Shipment, at rank 0 -> deliver(workers) -> what each confirmed, or how it was lost

Store        through the object store: a node's workers read one copy in shared memory
Collective   by broadcast, in flat buckets: between nodes and GPUs, without a stop

In one process nothing moves: the engine computes on the learner's own weights, and nobody asks a transport.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, Worker, WorkerLost
from plaudit.weights.collective import AbsentError, CollectiveError, Invitation, NotHeldError

Outcome = tuple[int, str] | WorkerLost
"""Version and digest that a worker confirmed, or how it was lost."""


class Shipment(Protocol):
    """Weights of one version, ready where they were trained, for as long as there are no newer ones.

    The caller promises workers whose `load(attempt, ...)` takes them, and to replace what was lost. The implementer
    promises an outcome for each worker, in their order, whatever happens to the others; it raises what `load` raises,
    and SenderLost where the weights are gone.
    """

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    async def deliver(self, workers: Sequence[Worker], attempt: int) -> list[Outcome]: ...


class Ranks(Protocol):
    """Training ranks. Where a call fails because one of them is lost, WorkerLost names that one."""

    @property
    def first(self) -> Worker:
        """Rank 0."""
        ...

    async def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call on every rank."""
        ...

    async def keep(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call on every rank a method that returns a pair at rank 0. The first stays over there: here comes a reference
        to it."""
        ...


class Transport(Protocol):
    async def pack(self, ranks: Ranks, version: int) -> Shipment:
        """The policy's weights as they are now. Each rank takes part: it may have a share of them."""
        ...


def transport_of(settings: RuntimeSettings, *, gpus: bool) -> Transport:
    """`gpus`: each rank and rollout worker has one of its own, which NCCL needs: without, settings refuse it."""
    if settings.weights == "store":
        return Store()
    automatic = "nccl" if gpus else "gloo"
    backend = automatic if settings.backend == "auto" else settings.backend
    return Collective(backend=backend, timeout=settings.collective_timeout)


class Store:
    """Rank 0's parcel lies in the object store; whoever wants it is handed a reference."""

    async def pack(self, ranks: Ranks, version: int) -> Shipment:
        parcel, digest = await ranks.keep("parcel", version)
        return Stored(parcel, version, digest)


@dataclass(frozen=True)
class Stored:
    """A `Shipment`: a parcel, or a reference to one."""

    parcel: Any
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker], attempt: int) -> list[Outcome]:
        found = await asyncio.gather(
            *(worker.call("load", attempt, self.parcel) for worker in workers), return_exceptions=True
        )
        return [_outcome(one) for one in found]


class Collective:
    """Rank 0 broadcasts to all, and to those that come later."""

    def __init__(self, *, backend: str, timeout: float):
        self.backend, self._timeout = backend, timeout
        self._numbers = itertools.count()
        self._members: tuple[Worker, ...] = ()
        self._group = (0, "")
        self._one_at_a_time = asyncio.Lock()

    async def pack(self, ranks: Ranks, version: int) -> Shipment:
        device = "cuda" if self.backend == "nccl" else "cpu"
        digest, *_ = await ranks.each("hold", version, device)
        return Broadcast(self, ranks.first, version, digest)

    async def deliver(self, sender: Worker, version: int, workers: Sequence[Worker], attempt: int) -> list[Outcome]:
        """In as many rounds as it takes: in each, all that are left get the weights, or somebody is lost."""
        found: dict[Worker, Outcome] = {}
        async with self._one_at_a_time:
            while left := [worker for worker in workers if worker not in found]:
                found |= await self._round(sender, version, left, attempt)
        return [found[worker] for worker in workers]

    async def _round(self, sender: Worker, version: int, workers: list[Worker], attempt: int) -> dict[Worker, Outcome]:
        """Takes: a sender and workers. Waits for: all of them. Woken by: them, or the first to fail, after which nobody
        waits for one that has not come. Gives: who has the weights and who is lost; of who failed besides, nothing."""
        calls: list[asyncio.Future[Any]] = []
        try:
            first, *others = await self._invited(sender, version, workers)
            asked = [sender.call("send", first)]
            asked += [worker.call("load", attempt, mine) for worker, mine in zip(workers, others, strict=True)]
            sending, *loading = calls = [asyncio.ensure_future(one) for one in asked]
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            absent = self._absent(sending, workers)
            for worker in absent:
                worker.kill(self._late)
            if sending.done() and sending.exception() is None:
                await asyncio.wait(calls)  # all have the weights: some end the answers that they are at first
            elif waiting:
                await sender.call("dissolve", first)
                # Who has come waits no longer than this (see `Receiver`).
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

    async def _invited(self, sender: Worker, version: int, workers: list[Worker]) -> list[Invitation]:
        """To the last group if it has the same members, else to a new one."""
        members = (sender, *workers)
        if members != self._members:
            self._group = next(self._numbers), await sender.call("meet")
        self._members = ()  # unless all goes well
        number, address = self._group
        common = len(members), version, self.backend, self._timeout
        return [Invitation(address, number, rank, *common) for rank in range(len(members))]

    @property
    def _late(self) -> str:
        return f"did not come for the weights within {self._timeout:g} s (runtime.collective_timeout)"

    def _absent(self, sending: asyncio.Future[Any], workers: list[Worker]) -> list[Worker]:
        error = sending.exception() if sending.done() else None
        return [workers[rank - 1] for rank in error.args[0]] if isinstance(error, AbsentError) else []

    def _settled(self, workers: list[Worker], found: list[Any], absent: list[Worker]) -> dict[Worker, Outcome]:
        """Where some failed and nobody is known to be lost, those that failed are taken to be."""
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
    """A `Shipment` that rank 0 holds and sends when asked."""

    transport: Collective
    sender: Worker
    version: int
    digest: str

    async def deliver(self, workers: Sequence[Worker], attempt: int) -> list[Outcome]:
        return await self.transport.deliver(self.sender, self.version, workers, attempt)


async def _over(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Nobody waits for these calls any more, nor for what they fail with."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def _outcome(found: Any) -> Outcome:
    """Raises what is neither a confirmation nor a worker's loss."""
    if isinstance(found, SenderLost) or (isinstance(found, BaseException) and not isinstance(found, WorkerLost)):
        raise found
    return found if isinstance(found, WorkerLost) else tuple(found)
