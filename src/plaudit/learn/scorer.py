"""A model that is only asked, never trained: the reference's columns, a judge's scores, and all of evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.learn.readout import READOUTS, counts_once
from plaudit.learn.sharding import Placement, Whole, local
from plaudit.models.base import LanguageModel
from plaudit.models.lowrank import adapters_off
from plaudit.types import Role

COLUMNS: Mapping[Role, tuple[tuple[str, str], ...]] = {
    Role.POLICY: (("proximal", "logprobs"),),
    Role.REFERENCE: (("reference", "logprobs"),),
    Role.CRITIC: (("values", "values"), ("bootstrap", "scores")),
}
"""Which batch columns a role fills, and from which field of its output."""


class Scorer:
    """Runs a model over batches of any size without gradients, `token_budget` tokens at a time. `leader` is the model
    that it moves after, if any."""

    def __init__(
        self,
        model: LanguageModel,
        role: Role,
        *,
        temperature: float = 1.0,
        token_budget: int = 16384,
        leader: LanguageModel | None = None,
        placement: Placement | None = None,
    ):
        self.model, self.role, self.leader = model, role, leader
        self.placement = placement or Whole(model)
        self.temperature, self.token_budget = temperature, token_budget

    def annotate(self, batch: Batch) -> Batch:
        """The batch with this role's columns."""
        wanted = COLUMNS[self.role]
        parts: list[list[Tensor]] = [[] for _ in wanted]
        for number, output in enumerate(self.outputs(batch)):
            for (_, source), part in zip(wanted, parts, strict=True):
                column = getattr(output, source)
                assert column is not None, (self.role, source, number)
                part.append(column.to(batch.tokens.device))
        return batch.with_columns(**{name: torch.cat(part) for (name, _), part in zip(wanted, parts, strict=True)})

    @torch.no_grad()
    def outputs(self, batch: Batch) -> list[Output]:
        """Outputs of consecutive runs of rows, each within the token budget; together they cover the batch in order."""
        readout, device = READOUTS[self.role], self.placement.device
        parts = batch.consecutive(self.token_budget, once=counts_once(self.model, device))
        needed = len(parts)
        parts += [parts[-1]] * (self.placement.passes(needed) - needed)  # other ranks wait for this one in each pass
        with self.placement.present():
            outputs = [readout(self.model, part.to(device), self.temperature) for part in parts]
            self.placement.settle()
        return outputs[:needed]

    def follow(self, share: float) -> None:
        """Move by `share` of the way towards the leader."""
        assert self.leader is not None
        self.blend(dict(self.leader.named_parameters()), share)

    @torch.no_grad()
    def blend(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move every parameter by `share` of the way towards `weights` (an exponential moving average)."""
        for name, parameter in self.model.named_parameters():
            mine, towards = local(parameter), local(weights[name]).to(parameter.dtype)
            here = mine.to(towards.device)  # itself, unless it waits in host memory
            here.lerp_(towards, share)
            if here is not mine:
                mine.copy_(here)


class BaseScorer(Scorer):
    """Asks a model with adapters for what it said before it got them: the reference of a LoRA run, at no memory."""

    def outputs(self, batch: Batch) -> list[Output]:
        with adapters_off(self.model):
            return super().outputs(batch)
