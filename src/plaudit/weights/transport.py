"""Send a version's weights from the training ranks to rollout workers in other processes.

    Transport.pack(worker_group, version) -> Shipment: packed weights of each rank that sends some
             -> deliver(workers) -> an outcome per worker: version and digest, WeightsError or WorkerLost

    Store       through the object store: a node's workers read one copy in shared memory
    Collective  (`broadcast.py`) by broadcast, in flat buckets: between nodes and GPUs, without a stop

Every worker gets all of them, or only their changes if it holds the last version (`changes.py`). In one process nothing
moves: the engine computes on the learner's own weights, without a transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.runtime.worker import SenderLost, Worker, WorkerLost, reason_of
from plaudit.weights.changes import OtherBaseError
from plaudit.weights.collective import Invitation, NotHeldError
from plaudit.weights.packed import PackedWeights, PackReport
from plaudit.weights.pieces import WeightsError

Outcome = tuple[int, str] | WeightsError | WorkerLost
"""Version and digest that a worker confirmed, why it refused the weights, or how it was lost."""


class Shipment(Protocol):
    """Weights of one version, held by the training ranks until there are newer ones. The caller promises workers whose
    `load(attempt, ...)` takes them, and to replace lost workers. The implementer promises that `deliver` returns one
    outcome per worker, in order, even if other workers are lost. `deliver` raises other errors of `load`, and
    SenderLost if the weights are gone."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def reports(self) -> Sequence[PackReport]: ...

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]: ...


class Holder(Protocol):
    async def load(self, attempt: int, *sent: PackedWeights | Invitation) -> tuple[int, str]: ...


class Giver(Protocol):
    """The methods of a training rank that send its weights, in parts: `pack_part` returns a part, as changes of the
    last version if it can; `whole` returns it whole while that version is the newest; `hold` keeps parts for `send`."""

    def pack_part(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]: ...

    async def whole(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]: ...

    def hold(self, version: int, device: str) -> PackReport: ...

    async def meet(self) -> str: ...

    async def send(self, invitation: Invitation) -> None: ...

    async def dissolve(self, invitation: Invitation) -> None: ...


class Transport(Protocol):
    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
        """Pack the policy's current weights as `version`. All ranks take part, as each may hold a share of them."""
        ...


class Store:
    """Put the ranks' packed weights into the object store, a part of each at a time, and give workers references."""

    async def pack(self, ranks: RayWorkerGroup[Giver], version: int) -> Shipment:
        parts, reports = await self.collect(ranks, Giver.pack_part, version)
        return Stored(parts, version, reports[0].digest, reports, partial(self.collect, ranks, Giver.whole, version))

    async def collect(
        self, ranks: RayWorkerGroup[Giver], method: Any, version: int
    ) -> tuple[list[Any], list[PackReport]]:
        """Return references to all parts of all ranks, and a report about each part."""
        parts, reports = list[Any](), list[PackReport]()
        part = most = 0
        while part <= most:
            pairs = await ranks.keep(method, version, part)
            parts += [packed for packed, report in pairs if part < report.parts]
            reports += [report for _, report in pairs if part < report.parts]
            most = max(report.parts for _, report in pairs) - 1
            part += 1
        return parts, reports


class Stored:
    """A `Shipment` of packed weights or references to them; `wholes` is for workers that cannot apply changes."""

    def __init__(
        self,
        packed_parts: Sequence[Any],
        version: int,
        digest: str,
        reports: Sequence[PackReport] = (),
        wholes: Callable[[], Awaitable[tuple[list[Any], Any]]] | None = None,
    ):
        self.version, self.digest, self.reports = version, digest, reports
        self._packed_parts, self._wholes, self._asking = packed_parts, wholes, asyncio.Lock()
        self._whole: list[Any] = []

    async def deliver(self, workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
        found = await _loaded(self._packed_parts, workers, attempt)
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


async def _loaded(packed_parts: Sequence[Any], workers: Sequence[Worker[Holder]], attempt: int) -> list[Outcome]:
    calls = (worker.call(Holder.load, attempt, *packed_parts) for worker in workers)
    return [outcome_of(one) for one in await asyncio.gather(*calls, return_exceptions=True)]


def outcome_of(found: Any) -> Outcome:
    """Return a worker's outcome; raise any other error."""
    if isinstance(found, BaseException):
        if isinstance(found, SenderLost) or not isinstance(found, WeightsError | WorkerLost):
            raise found
        return found
    return tuple(found)
