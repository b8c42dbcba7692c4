"""Moves a version's weights from the training ranks to rollout workers in other processes.

    Transport.pack(worker_group, version) -> Shipment, in parcels, one at each rank that gives some of the weights
             -> deliver(workers) -> what each confirmed, or how it was lost

    Store       through the object store: a node's workers read one copy in shared memory
    Collective  by broadcast, in flat buckets: between nodes and GPUs, without a stop

Every worker gets all parcels, or only their changes if it holds the last version (`changes.py`). In one process nothing
moves: the engine computes on the learner's own weights, without a transport.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import SenderLost, Worker, WorkerLost, reason_of
from plaudit.weights.changes import OtherBaseError
from plaudit.weights.collective import AbsentError, CollectiveError, Invitation, NotHeldError
from plaudit.weights.parcel import Given, Parcel, WeightsError

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

    @property
    def told(self) -> Sequence[Given]: ...

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]: ...


class Holder(Protocol):
    async def load(self, attempt: int, *sent: Parcel | Invitation) -> tuple[int, str]: ...


class Giver(Protocol):
    """A training rank, as far as its weights go. It gives them in parts: `parcel` returns one, as changes of the last
    version if it can, `whole` the same one whole, as long as it is the newest; `hold` keeps all parts."""

    def parcel(self, version: int, part: int) -> tuple[Parcel | None, Given]: ...

    async def whole(self, version: int, part: int) -> tuple[Parcel | None, Given]: ...

    def hold(self, version: int, device: str) -> Given: ...

    async def meet(self) -> str: ...

    async def send(self, invitation: Invitation) -> None: ...

    async def dissolve(self, invitation: Invitation) -> None: ...


class Transport(Protocol):
    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
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

    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
        parcels, told = await self.kept(ranks, Giver.parcel, version)
        return Stored(parcels, version, told[0].digest, told, partial(self.kept, ranks, Giver.whole, version))

    async def kept(self, ranks: RayWorkerGroup[Giver], method: Any, version: int) -> tuple[list[Any], list[Given]]:
        """References to all parts of all ranks, and what these say of them."""
        parcels: list[Any] = []
        told: list[Given] = []
        part = most = 0
        while part <= most:
            pairs = await ranks.keep(method, version, part)
            there = [(parcel, given) for parcel, given in pairs if part < given.parts]
            parcels += [parcel for parcel, _ in there]
            told += [given for _, given in there]
            most = max(given.parts for _, given in pairs) - 1
            part += 1
        return parcels, told


class Stored:
    """A `Shipment`: parcels, or references to them. `wholes` asks for whole ones, when a worker needs them."""

    def __init__(
        self,
        parcels: Sequence[Any],
        version: int,
        digest: str,
        told: Sequence[Given] = (),
        wholes: Callable[[], Awaitable[tuple[list[Any], Any]]] | None = None,
    ):
        self.version, self.digest, self.told = version, digest, told
        self._parcels, self._wholes, self._asking = parcels, wholes, asyncio.Lock()
        self._whole: list[Any] = []

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        found = await _loaded(self._parcels, workers, attempt)
        if left := [worker for worker, one in zip(workers, found, strict=True) if isinstance(one, OtherBaseError)]:
            again = iter(await _loaded(await self._asked(), left, attempt))
            found = [next(again) if isinstance(one, OtherBaseError) else one for one in found]
        return found

    async def _asked(self) -> list[Any]:
        assert self._wholes is not None
        async with self._asking:
            try:
                self._whole = self._whole or (await self._wholes())[0]
            except (NotHeldError, WorkerLost) as gone:
                raise SenderLost("a training rank", reason_of(gone)) from gone
            return self._whole


async def _loaded(parcels: Sequence[Any], workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
    calls = (worker.call(Holder.load, attempt, *parcels) for worker in workers)
    return [_outcome(one) for one in await asyncio.gather(*calls, return_exceptions=True)]


class Collective:
    """Broadcast from each rank that gives to all workers, and to those that join later."""

    def __init__(self, *, backend: str, timeout: float):
        self.backend, self._timeout = backend, timeout
        self._numbers = itertools.count()
        self._members: tuple[Worker[Any], ...] = ()
        self._group = (0, "")
        self._one_at_a_time = asyncio.Lock()

    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
        device = "cuda" if self.backend == "nccl" else "cpu"
        told = await ranks.each(Giver.hold, version, device)
        giving = [(rank, given) for rank, given in zip(ranks.workers, told, strict=True) if given.parts]
        return Broadcast(self, tuple(rank for rank, _ in giving), version, [given for _, given in giving])

    async def deliver(
        self, givers: Sequence[Worker[Giver]], version: int, workers: Sequence[Worker[Holder]], attempt: int
    ) -> list[Outcome]:
        """Deliver in as many rounds as needed: in each, all remaining workers get the weights, or one is lost. Those
        that lack what was changed get all in further rounds."""
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
        """Takes: givers and workers. Waits for: all of them. Woken by: them, or the first failure, after which no
        worker waits for an absent one. Gives: the workers that have the weights and those that are lost, nothing for
        others that failed."""
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
        self, givers: Sequence[Worker[Giver]], version: int, workers: list[Worker[Holder]], *, whole: bool
    ) -> list[Invitation]:
        """Invite to the last group if it has the same members, else to a new one."""
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
    told: Sequence[Given]

    @property
    def digest(self) -> str:
        return self.told[0].digest

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
