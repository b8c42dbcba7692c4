"""The in-process gang: plain objects, plain calls. The same workers run under Ray."""

from __future__ import annotations

from typing import Any

from assent.runtime.gang import Shardable


class LocalGang:
    """One rank in this process. A process holds one rank: several in turn could not meet in a collective."""

    world = 1

    def __init__(self, worker: Any):
        self.worker = worker

    async def each(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.worker, method)(*arguments)]

    async def split(self, method: str, batch: Shardable, *arguments: Any) -> list[Any]:
        return [getattr(self.worker, method)(batch.shard(0, 1), *arguments)]

    async def any(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)
