"""A gang is a set of ranks that run the same worker class. Whoever calls one never asks where it runs."""

from __future__ import annotations

from typing import Any, Protocol


class Shardable(Protocol):
    """What can be spread over ranks."""

    def shard(self, rank: int, world: int) -> Any: ...


class Gang(Protocol):
    """The caller promises that methods exist on the worker and that `split` arguments have at least one unit a rank.
    The implementer promises results in rank order, and the worker's own exception if one raises."""

    world: int

    async def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call on every rank with the same arguments."""
        ...

    async def split(self, method: str, batch: Shardable, *arguments: Any) -> list[Any]:
        """Call on every rank with its shard of the batch."""
        ...

    async def any(self, method: str, *arguments: Any) -> Any:
        """Call on one rank, where all would answer the same."""
        ...
