"""A gang is a set of ranks that run the same worker class. Whoever calls one never asks where it runs.

loop -> Gang.split("step", batch) -> scatter: one call a rank -> results in rank order
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class Shardable(Protocol):
    """What can be spread over ranks: `shards(world)` has something for every rank, however little there is."""

    def shards(self, world: int) -> Sequence[Any]: ...


class Gang(ABC):
    """The caller promises that methods exist on the worker. The implementer promises results in rank order, and the
    worker's own exception if one raises."""

    world: int

    @abstractmethod
    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call on every rank at once, each with arguments of its own."""

    @abstractmethod
    async def any(self, method: str, *arguments: Any) -> Any:
        """Call on one rank, where all would answer the same."""

    async def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call on every rank with the same arguments."""
        return await self.scatter(method, [arguments] * self.world)

    async def split(self, method: str, batch: Shardable, *arguments: Any) -> list[Any]:
        """Call on every rank with its shard of the batch."""
        return await self.scatter(method, [(shard, *arguments) for shard in batch.shards(self.world)])


class Part(Gang):
    """One named part of every worker of a gang, as a gang of its own: workers answer `do(name, method, *arguments)`."""

    def __init__(self, gang: Gang, name: str):
        self.gang, self.name, self.world = gang, name, gang.world

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await self.gang.scatter("do", [(self.name, method, *mine) for mine in arguments])

    async def any(self, method: str, *arguments: Any) -> Any:
        return await self.gang.any("do", self.name, method, *arguments)
