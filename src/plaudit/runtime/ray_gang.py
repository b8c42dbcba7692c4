"""Training ranks in processes of their own, as a gang: where a call fails, the rank is named that is to blame.

Left out: starting ranks, and what follows on a loss.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from plaudit.runtime.gang import Gang
from plaudit.runtime.worker import WorkerLost, reason_of

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker

GRACE = 2.0
"""Seconds after a collective failed on one rank in which it does on all that were in it."""


class RayGang(Gang):
    """Ranks in processes of their own; rank 0 answers for all where one is enough."""

    def __init__(self, workers: Sequence[RayWorker], *, patience: float = math.inf):
        """Once a call failed on a rank, the others have `patience` seconds for a sign, and never more than a heartbeat
        may take."""
        self.workers, self.world, self._patience = tuple(workers), len(workers), patience

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self.workers, arguments, strict=True)
        return await self._all([worker.call(method, *mine) for worker, mine in pairs])

    async def begin(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Likewise for what is a part of starting, within runtime.start_timeout."""
        pairs = zip(self.workers, arguments, strict=True)
        return await self._all([worker.begin(method, *mine) for worker, mine in pairs])

    async def _all(self, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Ends with the first failure: ranks that wait for a lost one would do so until their time-out."""
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
        """A rank that is gone or stuck, where another only noticed; a broken collective is nobody's own mistake."""
        if self.world == 1:
            return None
        lost = await self._lost()
        if lost is None and _of_collective(error):
            await asyncio.wait(calls, timeout=GRACE)
            pairs = list(zip(self.workers, calls, strict=True))
            stuck = next((worker for worker, call in pairs if not call.done()), None)
            if stuck is not None:
                return WorkerLost(stuck.name, f"the others waited for it in vain ({reason_of(error)})")
            failed = next(worker for worker, call in pairs if call.exception())
            lost = WorkerLost(failed.name, f"a collective failed ({reason_of(error)})")
        return lost

    async def _lost(self) -> WorkerLost | None:
        """The first rank that is gone, or gives no sign in the time of a heartbeat."""
        asked = [asyncio.ensure_future(worker.found()) for worker in self.workers]
        done, late = await asyncio.wait(asked, timeout=None if math.isinf(self._patience) else self._patience)
        for sign in late:
            sign.cancel()
        return next((lost for sign in asked if sign in done and (lost := sign.result()) is not None), None)

    @property
    def first(self) -> RayWorker:
        return self.workers[0]

    async def any(self, method: str, *arguments: Any) -> Any:
        return await self.first.call(method, *arguments)

    async def keep(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call on every rank a method that returns a pair at rank 0: the first stays there, and what comes here is a
        reference to it."""
        others = (worker.call(method, *arguments) for worker in self.workers[1:])
        pair, *_ = await self._all([self.first.keep(method, *arguments), *others])
        return pair  # type: ignore[no-any-return]


def _of_collective(error: Exception) -> bool:
    """torch has classes of its own for some failures of a process group, and a RuntimeError for those of gloo."""
    return type(error).__name__.startswith("Dist") or (type(error) is RuntimeError and "gloo" in str(error).lower())
