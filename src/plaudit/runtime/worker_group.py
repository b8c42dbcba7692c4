"""A worker group: a set of ranks that run the same worker class. Its caller does not know where they run.

loop -> WorkerGroup.split(Learner.prepare, batch) -> scatter: one call a rank -> results in rank order
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from plaudit.runtime.worker import Arguments, Kind_co, Result

Shard = TypeVar("Shard")
Shard_co = TypeVar("Shard_co", covariant=True)
Other = TypeVar("Other")


class Shardable(Protocol[Shard_co]):
    """Data that can be split over ranks: `shards(world)` returns `world` shards, never fewer."""

    def shards(self, world: int) -> Sequence[Shard_co]: ...


class WorkerGroup(ABC, Generic[Kind_co]):
    """Calls take a method of the worker's class, whose types are checked; its name travels. The implementer promises
    results in rank order, and the worker's own exception if one raises."""

    world: int
    width: int = 1  # ranks that get the same shard, since each holds a part of one model
    stages: int = 1  # pipeline stages: all get each shard, and the last one returns its results
    name: str | None = None
    """The part of each worker that is called; None: the worker itself."""

    @abstractmethod
    async def scatter(
        self, method: Callable[[Kind_co, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        """Call a method on all ranks at once, each with its own arguments. Return results in rank order."""

    async def each(self, method: Callable[[Kind_co, *Arguments], Result], *arguments: *Arguments) -> list[Result]:
        """Call a method on all ranks with the same arguments. Return results in rank order."""
        return await self.scatter(method, [arguments] * self.world)

    async def split(
        self, method: Callable[[Kind_co, Shard, *Arguments], Result], batch: Shardable[Shard], *arguments: *Arguments
    ) -> list[Result]:
        """Call a method on all ranks, each with its shard of the batch. Return one result per shard, in order."""
        each = self.world // self.stages
        calls = [(shard, *arguments) for shard in batch.shards(each // self.width) for _ in range(self.width)]
        return (await self.scatter(method, calls * self.stages))[-each :: self.width]

    def part(self, kind: type[Other], name: str) -> WorkerGroup[Other]:
        """Return a group of the same processes whose calls go to a part of each worker: what `part(name)` yields."""
        part: Any = copy(self)
        part.name = name
        return part  # type: ignore[no-any-return]
