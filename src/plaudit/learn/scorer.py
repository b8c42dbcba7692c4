"""A model that is run but not trained: a reference, a judge, a policy in evaluation.

Batch -> consecutive parts within the token budget -> forward -> Output, ... -> columns of the batch
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.learn.columns import COLUMNS, Annotations
from plaudit.learn.passes import TokenBudget, scoring
from plaudit.learn.readout import Work, counts_once
from plaudit.learn.sharding import Placement, Whole, finite, local
from plaudit.models.base import LanguageModel
from plaudit.models.lowrank import adapters_off
from plaudit.types import Role


class Scorer:
    """Runs a model without gradients over batches of any size, `token_budget` tokens at a time (int, or TokenBudget
    shared with other models). If memory does not hold them, it uses fewer from then on. `leader` is the model towards
    which `follow` moves this one, if any."""

    def __init__(
        self,
        model: LanguageModel,
        role: Role,
        *,
        temperature: float = 1.0,
        token_budget: int | TokenBudget = 16384,
        leader: LanguageModel | None = None,
        placement: Placement | None = None,
    ):
        self.model, self.role, self.leader = model, role, leader
        self.placement = placement or Whole(model)
        self.temperature = temperature
        self.budget = scoring(token_budget) if isinstance(token_budget, int) else token_budget

    def annotate(self, batch: Batch) -> Batch:
        """Return the batch with this role's columns."""
        return batch.with_columns(**self.columns(batch))

    def columns(self, batch: Batch) -> Annotations:
        """Return this role's columns of the batch; {} on a pipeline stage before the last. A reference also returns the
        sampler's log-probs, `behaviour`, if the batch has them: the driver may not have them."""
        batch = batch.landed()
        parts: dict[str, list[Tensor]] = {}
        for output in self.outputs(batch):
            for name, column in COLUMNS[self.role](output).items():
                assert column is not None, (self.role, name)
                parts.setdefault(name, []).append(column.to(batch.tokens.device))
        if parts and self.role is Role.REFERENCE and batch.behaviour is not None:
            parts["behaviour"] = [batch.behaviour]
        return Annotations({name: torch.cat(part) for name, part in parts.items()})

    @torch.no_grad()
    def outputs(self, batch: Batch) -> list[Output]:
        """Return the outputs of consecutive parts of the batch, in order, each within the token budget; [] on a stage
        before the last. Raises UnitTooLong if memory does not hold a pass over one unit."""
        device = self.placement.device
        needed = 0

        def cut(tokens: int) -> list[Batch]:
            nonlocal needed
            parts = batch.consecutive(tokens, once=counts_once(self.model, device))
            needed = len(parts)
            return parts + [parts[-1]] * (self.placement.passes(needed) - needed)  # ranks must make equally many passes

        work = Work(self.model, self.role, device, self.temperature, lambda output, part: (None, output))
        with self.placement.present():
            outputs = self.placement.fit(self.budget, cut, work)
            self.placement.settle()
        return outputs[:needed]

    def sound(self, whole: bool) -> bool:
        """True if this rank's part of the weights is finite."""
        return finite(local(p) for p in self.model.parameters())

    def onload(self) -> None:
        """Bring masters and moments to the device; a scorer has none."""

    def offload(self) -> None:
        """Move masters and moments to host memory until `onload`; a scorer has none."""

    def follow(self, share: float) -> None:
        """Move each parameter by `share` of the way towards the leader's (EMA)."""
        assert self.leader is not None
        self.blend(self.leader.get_parameter, share)

    @torch.no_grad()
    def blend(self, weights: Callable[[str], Tensor], share: float) -> None:
        """Move every parameter by `share` of the way towards `weights(name)` (an exponential moving average)."""
        for name, parameter in self.model.named_parameters():
            mine, towards = local(parameter), local(weights(name)).to(parameter.dtype)
            here = mine.to(towards.device)  # itself, unless it waits in host memory
            here.lerp_(towards, share)
            if here is not mine:
                mine.copy_(here)


class BaseScorer(Scorer):
    """Runs the policy with its adapters off, as the reference of a LoRA run; it needs no weights of its own."""

    def outputs(self, batch: Batch) -> list[Output]:
        with adapters_off(self.model):
            return super().outputs(batch)
