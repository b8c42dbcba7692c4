"""The models of a run by call, as the loop asks for them: typed and awaitable, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from plaudit.algorithms.base import Objective
from plaudit.algorithms.figures import merge_stats
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.scorer import Scorer
from plaudit.learn.watched import WATCHED, Seen, Watched
from plaudit.runtime.gang import Gang
from plaudit.types import Role, Stats


class Scorers:
    """The gang of a model that is run and not trained."""

    def __init__(self, gang: Gang[Scorer]):
        self.gang = gang
        self.moves = 0
        """Number of times that its weights were asked to move."""

    async def annotate(self, batch: Batch) -> Batch:
        """Return the batch with this role's columns, rows in the given order."""
        return batch.rejoined(await self.gang.split(Scorer.annotate, batch))

    async def sound(self, *, whole: bool) -> bool:
        """True if the weights are finite on every rank; with `whole`, also everything else that a checkpoint holds of
        them."""
        return all(await self.gang.each(Scorer.sound, whole))

    async def follow(self, share: float) -> None:
        """Move a reference by `share` of the way towards the policy, which is on every rank too."""
        self.moves += 1
        await self.gang.each(Scorer.follow, share)


class Learners(Scorers):
    """The gang of a model that is trained."""

    gang: Gang[Learner]

    def __init__(self, gang: Gang[Learner]):
        super().__init__(gang)

    async def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        """Compute gradients of a weighed batch, spread over the ranks, and return figures that all ranks agree on. Call
        `apply` afterwards. `rate` multiplies the learning rate."""
        return (await self.gang.split(Learner.prepare, batch, step, rate))[0]

    async def apply(self, take: bool) -> None:
        """Take the prepared optimizer step, or drop it."""
        self.moves += take
        await self.gang.each(Learner.apply, take)

    async def evaluate(self, batch: Batch) -> Stats:
        """Return figures of the loss on a weighed batch."""
        return merge_stats(await self.gang.split(Learner.evaluate, batch))

    async def save(self, path: Path) -> dict[str, Any]:
        """Let every rank write its part of the optimizer's state to a file. Return the rest of the state."""
        return (await self.gang.each(Learner.save, path))[0]

    async def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        await self.gang.each(Learner.restore, path, values)


@dataclass(frozen=True)
class Cast:
    """The models of a run: those it trains, and the reference if the method asks for one."""

    objective: Objective
    trained: Mapping[Role, Learners]
    reference: Scorers | None = None
    reference_ema: float = 0.0
    rate: float = 1.0
    """Factor of all learning rates."""
    watched: Gang[Watched] | None = None

    @classmethod
    def together(cls, ranks: Gang[Any], objective: Objective, reference_ema: float) -> Self:
        """Every model on every rank of one gang, as a part named for its role."""
        trained = {role: Learners(ranks.part(Learner, role)) for role in objective.losses()}
        asked = Role.REFERENCE in objective.asks
        reference = Scorers(ranks.part(Scorer, Role.REFERENCE)) if asked else None
        return cls(objective, trained, reference, reference_ema, watched=ranks.part(Watched, WATCHED))

    @property
    def saved(self) -> Mapping[Role, Scorers]:
        """The models that a checkpoint holds: those that move."""
        moving = {Role.REFERENCE: self.reference} if self.reference is not None and self.reference_ema else {}
        return {**self.trained, **moving}

    @property
    def moves(self) -> int:
        """A count that grows whenever weights were asked to move."""
        return sum(model.moves for model in self.saved.values())

    async def sound(self, *, whole: bool = False) -> bool:
        """True if the weights that move are finite on every rank; with `whole`, the optimizers' moments too."""
        return all([await model.sound(whole=whole) for model in self.saved.values()])

    async def seen(self) -> list[Seen]:
        """Return what the policy's ranks computed of sampled tokens since the last call."""
        if self.watched is None:
            return []
        ranks = (await self.watched.each(Watched.taken))[:: self.watched.width]  # others have seen the same
        return [one for rank in ranks for one in rank]

    async def annotate(self, batch: Batch) -> Batch:
        """Fill the columns that the objective asks for and that the rows lack."""
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
