"""The models of a run by role, as the loop calls them: typed, awaitable, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plaudit.algorithms.base import Objective
from plaudit.batch import Batch
from plaudit.runtime.gang import Gang
from plaudit.types import Role, Stats, merge_stats


class Actor:
    """One role's gang behind typed calls. A reference answers `annotate` and `follow`; learners all the others."""

    def __init__(self, gang: Gang):
        self.gang = gang

    async def prepare(self, batch: Batch, step: int) -> Stats:
        """Gradients of a weighed batch, spread over the ranks, which agree on its figures; `apply` must follow."""
        stats: Stats = (await self.gang.split("prepare", batch, step))[0]
        return stats

    async def apply(self, take: bool) -> None:
        """Take the prepared optimizer step, or drop it."""
        await self.gang.each("apply", take)

    async def evaluate(self, batch: Batch) -> Stats:
        """Figures of the loss on a weighed batch."""
        return merge_stats(await self.gang.split("evaluate", batch))

    async def annotate(self, batch: Batch) -> Batch:
        """The batch with this role's columns, rows in the order given."""
        return batch.rejoined(await self.gang.split("annotate", batch))

    async def follow(self, share: float) -> None:
        """Move a reference by `share` of the way towards the policy, which stands beside it on every rank."""
        await self.gang.each("follow", share)

    async def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state: tuple[dict[str, Tensor], dict[str, Any]] = (await self.gang.each("state"))[0]
        return state

    async def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        await self.gang.each("restore", tensors, values)


@dataclass(frozen=True)
class Cast:
    """Who plays in this run: the models it trains, and the reference where the method asks for one."""

    objective: Objective
    trained: Mapping[Role, Actor]
    reference: Actor | None = None
    reference_ema: float = 0.0

    async def annotate(self, batch: Batch) -> Batch:
        """Fill the columns that the objective asks for and that the rows do not bring along."""
        asks = self.objective.asks
        if self.objective.recompute_old:
            batch = await self.trained[Role.POLICY].annotate(batch)
        if Role.REFERENCE in asks and batch.reference is None:
            assert self.reference is not None, "assemble gives a reference to every method that asks for one"
            batch = await self.reference.annotate(batch)
        if Role.CRITIC in asks:
            batch = await self.trained[Role.CRITIC].annotate(batch)
        return batch

    async def follow(self) -> None:
        """Let a moving reference follow the policy, after a step."""
        if self.reference is not None and self.reference_ema:
            await self.reference.follow(self.reference_ema)
