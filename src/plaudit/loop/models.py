"""Typed, awaitable handles by which the loop calls a run's models, whichever processes these are in.

loop: Batch -> Models.annotate, prepare, apply -> worker group -> Scorer, Learner of each rank -> columns, figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from plaudit.algorithms.base import Objective
from plaudit.algorithms.figures import whole_stats
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.scorer import Scorer
from plaudit.learn.watched import WATCHED, Watched, WatchedRows
from plaudit.runtime.coroutines import together
from plaudit.runtime.worker_group import WorkerGroup
from plaudit.types import Role, Stats

AnyGroup = WorkerGroup[Any]


class Scorers:
    """A model that is only evaluated, as a worker group. Models with the same `home` are in the same processes."""

    def __init__(self, worker_group: AnyGroup, home: object = None):
        self.worker_group: WorkerGroup[Scorer] = worker_group
        self.home = home
        self.moves = 0
        """Number of weight changes asked for so far: optimizer steps taken, EMA moves."""

    async def annotate(self, batch: Batch) -> Batch:
        """Return the batch with this role's columns. Only columns that a forward pass reads are sent to the ranks."""
        return batch.rejoined(await self.worker_group.split(Scorer.columns, batch.sequences()))

    async def sound(self, *, whole: bool) -> bool:
        """True if trained weights (of a scorer: all) are finite on every rank; `whole`: frozen ones and moments too."""
        return all(await self.worker_group.each(Scorer.sound, whole))

    async def follow(self, share: float) -> None:
        """Move an EMA reference by `share` of the way towards the policy, which the same ranks have."""
        self.moves += 1
        await self.worker_group.each(Scorer.follow, share)


class Learners(Scorers):
    """The worker group of a model that is trained."""

    worker_group: WorkerGroup[Learner]

    async def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        """Split a weighed batch over the ranks, compute its gradients and return figures that all ranks agree on. Call
        `apply` afterwards. `rate` multiplies the learning rate."""
        return whole_stats((await self.worker_group.split(Learner.prepare, batch, step, rate))[:1])

    async def apply(self, take: bool) -> None:
        """Take the prepared optimizer step, or drop it."""
        self.moves += take
        await self.worker_group.each(Learner.apply, take)

    async def evaluate(self, batch: Batch) -> Stats:
        """Return figures of the loss on a weighed batch."""
        return whole_stats(await self.worker_group.split(Learner.evaluate, batch))

    async def save(self, path: Path) -> dict[str, Any]:
        """Let every rank write its part of the optimizer's state to a file. Return the rest of the state."""
        return (await self.worker_group.each(Learner.save, path))[0]

    async def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        await self.worker_group.each(Learner.restore, path, values)


Model = TypeVar("Model", bound=Scorers)


def by_home(models: Sequence[Model]) -> list[list[Model]]:
    """Return lists of models that share processes, in order: a worker group runs one call at a time."""
    homes: dict[int, list[Model]] = {}
    for model in models:
        homes.setdefault(id(model.home), []).append(model)
    return list(homes.values())


@dataclass(frozen=True)
class Models:
    """The models of a run: those it trains, and the reference if the method asks for one."""

    objective: Objective
    trained: Mapping[Role, Learners]
    reference: Scorers | None = None
    reference_ema: float = 0.0
    rate: float = 1.0
    """Factor of all learning rates."""
    watched: WorkerGroup[Watched] | None = None

    @classmethod
    def together(
        cls, ranks: AnyGroup, objective: Objective, reference_ema: float, apart: Mapping[str, AnyGroup] | None = None
    ) -> Self:
        """Return a run's models: each is the part named by its role of `ranks`, or of its own group in `apart`."""
        homes = {role: (apart or {}).get(role, ranks) for role in Role}
        trained = {role: Learners(homes[role].part(Learner, role), homes[role]) for role in objective.losses()}
        asked, home = Role.REFERENCE in objective.asks, homes[Role.REFERENCE]
        reference = Scorers(home.part(Scorer, Role.REFERENCE), home) if asked else None
        return cls(objective, trained, reference, reference_ema, watched=ranks.part(Watched, WATCHED))

    async def apply(self, prepared: Sequence[Learners], take: bool) -> None:
        """Take or drop the step of all models that `prepare` returned."""

        async def applied(models: Sequence[Learners]) -> None:
            for model in models:
                await model.apply(take)

        await together(map(applied, by_home(prepared)))

    @property
    def saved(self) -> Mapping[Role, Scorers]:
        """Models whose weights a checkpoint holds, by role: the trained ones and an EMA reference."""
        moving = {Role.REFERENCE: self.reference} if self.reference is not None and self.reference_ema else {}
        return {**self.trained, **moving}

    @property
    def moves(self) -> int:
        """Number of weight changes asked for so far, over all saved models: if it is equal, so are the weights."""
        return sum(model.moves for model in self.saved.values())

    async def sound(self, *, whole: bool = False) -> bool:
        """True if trained weights and an EMA reference are finite on all ranks; `whole`: frozen ones, moments too."""
        return all([await model.sound(whole=whole) for model in self.saved.values()])

    async def watched_rows(self, groups: Sequence[int]) -> list[WatchedRows]:
        """Return the policy's log-probs and entropies of these groups since the last call; [] if none are watched."""
        if self.watched is None:
            return []
        ranks = (await self.watched.each(Watched.taken, groups))[:: self.watched.width]  # one rank of each replica
        return [one for rank in ranks for one in rank]

    async def annotate(self, batch: Batch) -> Batch:
        """Return the batch with the columns that the objective asks for; a reference column that it has already is
        kept. Models in different processes compute concurrently."""
        asks, asked = self.objective.asks, list[Scorers]()
        if self.objective.recompute_old:
            asked.append(self.trained[Role.POLICY])
        if Role.REFERENCE in asks and batch.reference is None:
            assert self.reference is not None, "assemble gives a reference to every method that asks for one"
            asked.append(self.reference)
        if Role.CRITIC in asks:
            asked.append(self.trained[Role.CRITIC])

        async def filled(models: Sequence[Scorers]) -> Batch:
            found = batch
            for model in models:
                found = await model.annotate(found)
            return found

        first, *others = await together(map(filled, by_home(asked))) if asked else [batch]
        new = (one.columns().items() for one in others)
        return first.with_columns(**{name: one for items in new for name, one in items if name not in batch.columns()})

    async def prepare(self, batch: Batch, step: int) -> tuple[list[Learners], Stats]:
        """Compute an update's gradients: concurrently if each model has its own processes, else in turn, the policy
        first. Return the models that were asked, and their figures up to the first that is skipped or halted."""
        stats, prepared = Stats(), list[Learners]()
        models = sorted(self.trained.items(), key=lambda item: item[0] is not Role.POLICY)
        homes = by_home([model for _, model in models])
        at_once = [[home[0] for home in homes]] if len(homes) == len(models) else [[model] for _, model in models]
        for some in at_once:
            prepared += some
            for stats_of_one in await together(model.prepare(batch, step, self.rate) for model in some):
                if stats.get("skipped") or stats.get("halted"):
                    return prepared, stats
                stats |= stats_of_one
            if stats["skipped"] or stats["halted"]:
                break
        return prepared, stats

    async def follow(self) -> None:
        """Move an EMA reference towards the policy after a step; without one, do nothing."""
        if self.reference is not None and self.reference_ema:
            await self.reference.follow(self.reference_ema)
