"""One model, its optimizer and one loss: a batch in, an optimizer step out.

    Batch (whole step, weighed) -> micro-batches -> forward, loss, backward, summed -> clip -> AdamW

The learner does not know which method runs: the loss is handed in. It never divides by the number of micro-batches:
the weights in the batch already are shares of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn
from plaudit.batch import Batch
from plaudit.learn.optim import Optimizer, schedule
from plaudit.learn.readout import READOUTS, counts_once, shares
from plaudit.learn.scorer import Scorer
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, Whole
from plaudit.models.base import LanguageModel
from plaudit.types import Role, Stats, merge_stats, plain

Halt = Callable[[Stats], str | None]


class Learner:
    """Trains `model` in `role` by `loss`. `total_steps` is the run's length, for the schedule; `placement` knows the
    other ranks, which train the same model on other shards of each batch."""

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
        halt: Halt = lambda stats: None,
        placement: Placement | None = None,
    ):
        self.placement = placement or Whole(model)
        self.model, self.role, self.loss, self.halt = model, role, loss, halt
        self.settings, self.optimizer_settings, self.total_steps = settings, optimizer, total_steps
        self.optimizer = Optimizer(model, optimizer, self.placement)
        budget = settings.score_tokens
        self.scorer = Scorer(model, role, temperature=temperature, token_budget=budget, placement=self.placement)

    def step(self, batch: Batch, step: int) -> Stats:
        """One optimizer step on a weighed batch, or none: `prepare`, and `apply` where nothing speaks against it."""
        stats = self.prepare(batch, step)
        self.apply(not (stats["skipped"] or stats["halted"]))
        return stats

    def prepare(self, batch: Batch, step: int) -> Stats:
        """Gradients of a weighed batch, as part of training step `step` (0-based); `apply` must follow.

        `skipped` is 1 if the loss or a gradient is not finite, `halted` if the method's `halt` has a reason to stop.
        """
        rate = self.optimizer_settings.learning_rate * schedule(step, self.total_steps, self.optimizer_settings)
        self.optimizer.rate = rate
        parts = self._micro(batch, self.settings.micro_tokens)
        stats = self.placement.ranks.merge(merge_stats([self._backward(part) for part in parts]))
        self.optimizer.collect()
        self.placement.sum(self.optimizer.gradients())
        norm = self.optimizer.gradient_norm()
        stats |= {f"gradient_norm/{self.role}": norm, f"learning_rate/{self.role}": rate}
        stats |= {"skipped": 0.0, "halted": 0.0}
        if not (torch.isfinite(torch.tensor([norm, stats[f"loss/{self.role}"]])).all()):
            stats["skipped"] = 1.0
        elif self.halt(stats) is not None:
            stats["halted"] = 1.0
        return stats

    def apply(self, take: bool) -> None:
        """Take the prepared step, or leave weights and moments as they are."""
        if take:
            self.optimizer.step()
        self.optimizer.clear()

    def _micro(self, batch: Batch, tokens: int) -> list[Batch]:
        """As many micro-batches as every other rank has, where each forward pass holds collectives."""
        together = self.settings.share_prefixes and shares(self.model, self.placement.device)
        once = together and counts_once(self.model, self.placement.device)
        parts = batch.micro(tokens, together=together, once=once)
        return parts + [parts[-1].weightless()] * (self.placement.passes(len(parts)) - len(parts))

    def _backward(self, part: Batch) -> Stats:
        loss, stats = self._loss(part)
        loss.backward()  # type: ignore[no-untyped-call]
        return stats

    def _loss(self, part: Batch) -> tuple[Tensor, Stats]:
        part = part.to(self.placement.device)
        output = READOUTS[self.role](self.model, part, self.scorer.temperature, share=self.settings.share_prefixes)
        loss, figures = self.loss(output, part)
        stats = plain(figures, f"the figures of the {self.role}'s loss")
        return loss, stats if f"loss/{self.role}" in stats else {f"loss/{self.role}": float(loss.detach())} | stats

    def annotate(self, batch: Batch) -> Batch:
        """The batch with this role's columns (proximal log-probs of a policy, values of a critic)."""
        return self.scorer.annotate(batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Stats:
        """The loss's figures over a weighed batch, without learning from it."""
        stats = merge_stats([self._loss(part)[1] for part in self._micro(batch, self.settings.score_tokens)])
        self.placement.settle()
        return stats

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters themselves, by name: shared, not copied, and in shards where they are spread."""
        return dict(self.model.named_parameters())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's tensors by parameter name, whole, from the first rank; all must be asked. The weights are the
        model's own checkpoint."""
        return self.placement.full(self.optimizer.state()), {}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Back to `state`. Raises ValueError if the tensors are not this model's."""
        self.optimizer.restore(tensors)
