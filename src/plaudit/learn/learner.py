"""One model, its optimizer and its loss: a batch comes in, an optimizer step goes out.

    Batch (weighed) -> micro-batches -> forward, loss, backward -> summed gradients -> clip -> AdamW -> figures

It gets the loss, not the method. It never divides by micro-batches: a batch's weights are shares of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Output
from plaudit.algorithms.figures import merge_stats, plain
from plaudit.batch import Batch
from plaudit.learn.optim import Optimizer, schedule
from plaudit.learn.passes import Passes, UnitTooLong
from plaudit.learn.readout import Teacher, Work, counts_once
from plaudit.learn.scorer import Scorer
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, finite, local
from plaudit.learn.state import filled, opened
from plaudit.models.base import LanguageModel
from plaudit.models.boxes import Keep, write_boxes
from plaudit.types import Role, Stats

TOO_LONG = "too_long/max"
"""Figure by which a rank tells others how many tokens a unit has that does not fit in memory."""


class Learner(Scorer):
    """A scorer that also trains `model` in `role` to minimise `loss`. `total_steps` is the run's number of steps, for
    the schedule. `placement` knows the other ranks, which train the same model on other shards of each batch."""

    def __init__(
        self,
        model: LanguageModel,
        role: Role,
        loss: LossFn,
        *,
        optimizer: OptimizerSettings,
        settings: LearnSettings,
        total_steps: int,
        temperature: float = 1.0,
        halt: Callable[[Stats], str | None] = lambda stats: None,
        placement: Placement | None = None,
        passes: Passes | None = None,
        waits: bool = False,
        keep: Keep = write_boxes,
        teacher: Teacher | None = None,
    ):
        """A rank's models share `passes`. `waits`: masters and moments stay in host memory. `keep` saves boxes. With a
        `teacher` the loss gets `Output.divergence`."""
        self.passes = passes or Passes.of(settings)
        super().__init__(model, role, temperature=temperature, token_budget=self.passes.score, placement=placement)
        self.loss, self.halt, self.settings, self.keep, self.teacher = loss, halt, settings, keep, teacher
        self.optimizer_settings, self.total_steps = optimizer, total_steps
        self.optimizer = Optimizer(model, optimizer, self.placement, waits=waits)

    def step(self, batch: Batch, step: int) -> Stats:
        """Make one optimizer step on a weighed batch (`prepare`, then `apply`), unless it is skipped or halted."""
        stats = self.prepare(batch, step, 1.0)
        self.apply(not (stats["skipped"] or stats["halted"]))
        return stats

    def prepare(self, batch: Batch, step: int, rate: float) -> Stats:
        """Compute gradients of a weighed batch, as part of training step `step` (0-based). Call `apply` afterwards.
        `rate` multiplies the learning rate.

        Return figures: `skipped` is 1 if loss or gradient norm is not finite, `halted` if `halt` gives a reason. If
        memory runs out in a pass, this rank repeats all of its passes with smaller ones, and ranks then agree on the
        size. Raises UnitTooLong on all ranks if a unit does not fit on one.
        """
        rate *= self.optimizer_settings.learning_rate * schedule(step, self.total_steps, self.optimizer_settings)
        self.optimizer.rate = rate
        stats = self._backwards(batch.landed())
        self.placement.sum(self.optimizer.collect())
        norm = self.optimizer.gradient_norm()
        stats |= {f"gradient_norm/{self.role}": norm, f"learning_rate/{self.role}": rate, "skipped": 0.0, "halted": 0.0}
        if not (torch.isfinite(torch.tensor([norm, stats[f"loss/{self.role}"]])).all()):
            stats["skipped"] = 1.0
        elif self.halt(stats) is not None:
            stats["halted"] = 1.0
        return stats

    def apply(self, take: bool) -> None:
        """Take the prepared step, or drop it and leave weights and moments unchanged."""
        if take:
            self.optimizer.step()
        self.optimizer.clear()

    def onload(self) -> None:
        self.optimizer.onload()

    def offload(self) -> None:
        self.optimizer.offload()

    def sound(self, whole: bool) -> bool:
        """True if this rank's trained weights are finite; with `whole`, all of its weights, masters and moments."""
        if not whole:
            return finite(local(p) for p in self.optimizer.parameters.values())
        return finite((*(local(p) for p in self.model.parameters()), *self.optimizer.state().values()))

    def _micro(self, batch: Batch, tokens: int) -> list[Batch]:
        """Cut the batch into micro-batches. If all ranks must make equally many passes, add weightless copies."""
        once = self.model.caches and counts_once(self.model, self.placement.device)
        parts = batch.micro(tokens, together=self.model.caches, once=once)
        return parts + [parts[-1].weightless()] * (self.placement.passes(len(parts)) - len(parts))

    def _backwards(self, batch: Batch) -> Stats:
        """Run the backward passes of all micro-batches and return the figures of all ranks."""
        passes, cut, place = self.passes, partial(self._micro, batch), self.placement
        try:
            stats = merge_stats(place.fit(passes.micro, cut, self._work(trains=True)))
        except UnitTooLong as error:  # tell other ranks, which wait for this one's figures
            stats = {TOO_LONG: float(error.tokens)}
        stats = place.merge(stats | passes.figures())
        passes.agree(stats)
        if TOO_LONG in stats:
            self.optimizer.clear()
            raise UnitTooLong(int(stats[TOO_LONG]), passes.micro.advice)
        return stats

    def _work(self, *, trains: bool) -> Work[Stats]:
        where, clear = self.placement.device, self.optimizer.clear
        return Work(self.model, self.role, where, self.temperature, self._loss, trains, clear, self.teacher)

    def _loss(self, output: Output, part: Batch) -> tuple[Tensor, Stats]:
        loss, figures = self.loss(output, part)
        stats = plain(figures, f"the figures of the {self.role}'s loss")
        return loss, stats if f"loss/{self.role}" in stats else {f"loss/{self.role}": float(loss.detach())} | stats

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Stats:
        """Return this rank's figures of the loss over a weighed batch, without gradients; {} if it has none."""
        found = self.placement.fit(self.passes.score, partial(self._micro, batch), self._work(trains=False))
        self.placement.settle()
        return merge_stats(found)

    def save(self, path: Path) -> dict[str, Any]:
        """Write the optimizer's state, each rank its own part. Return what else `restore` needs besides the weights."""
        self.keep(filled(self.placement, self.optimizer.state(), path))
        return {"passes": passes} if (passes := self.passes.state()) else {}

    def restore(self, path: Path, values: Mapping[str, Any]) -> None:
        """Restore what `save` wrote (the optimizer's state) and returned (`values`: pass sizes). The number of ranks
        may differ; weights are loaded elsewhere. Raises ValueError for state of another model or learn.precision."""
        self.optimizer.restore(*opened(self.placement, path))
        self.passes.restore(values.get("passes", {}))
