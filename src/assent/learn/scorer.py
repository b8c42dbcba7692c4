"""A model that is only asked, never trained: the reference's columns, a judge's scores, and all of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from assent.algorithms.base import Output
from assent.batch import Batch
from assent.learn.readout import READOUTS
from assent.models.base import LanguageModel
from assent.types import Role, Row

COLUMNS: Mapping[Role, tuple[tuple[str, str], ...]] = {
    Role.POLICY: (("proximal", "logprobs"),),
    Role.REFERENCE: (("reference", "logprobs"),),
    Role.CRITIC: (("values", "values"), ("bootstrap", "scores")),
}
"""Which batch columns a role fills, and from which field of its output."""


class Scorer:
    """Runs a model over batches of any size without gradients, `token_budget` tokens at a time."""

    def __init__(self, model: LanguageModel, role: Role, *, temperature: float = 1.0, token_budget: int = 16384):
        self.model, self.role = model, role
        self.temperature, self.token_budget = temperature, token_budget

    def annotate(self, batch: Batch) -> Batch:
        """The batch with this role's columns."""
        wanted = COLUMNS[self.role]
        parts: list[list[Tensor]] = [[] for _ in wanted]
        for number, output in enumerate(self.outputs(batch)):
            for (_, source), part in zip(wanted, parts, strict=True):
                column = getattr(output, source)
                assert column is not None, (self.role, source, number)
                part.append(column)
        return batch.with_columns(**{name: torch.cat(part) for (name, _), part in zip(wanted, parts, strict=True)})

    @torch.no_grad()
    def outputs(self, batch: Batch) -> list[Output]:
        """Outputs of consecutive runs of rows, each within the token budget; together they cover the batch in order."""
        readout = READOUTS[self.role]
        return [readout(self.model, part, self.temperature) for part in consecutive(batch, self.token_budget)]

    def scores(
        self, sequences: Sequence[Sequence[int]], *, progress: Callable[[int], None] | None = None
    ) -> list[float]:
        """A judge's score of each token sequence."""
        scores: list[float] = []
        rows = [Row(tokens=tuple(tokens), trainable=(False,) * len(tokens)) for tokens in sequences]
        if not rows:
            return scores
        for part in consecutive(Batch.of(rows), self.token_budget):
            with torch.no_grad():
                output = READOUTS[Role.JUDGE](self.model, part, self.temperature)
            assert output.scores is not None
            scores.extend(output.scores.tolist())
            if progress is not None:
                progress(len(part))
        return scores

    @torch.no_grad()
    def blend(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Move every parameter by `share` of the way towards `weights` (an exponential moving average)."""
        for name, parameter in self.model.named_parameters():
            parameter.lerp_(weights[name].to(parameter.dtype), share)


def consecutive(batch: Batch, token_budget: int) -> list[Batch]:
    """Cut into runs of neighbouring units within the budget, order kept (a longer unit goes alone)."""
    per_unit = batch.lengths.view(-1, batch.unit).sum(1).tolist()
    if sum(per_unit) <= token_budget:
        return [batch]
    runs: list[list[int]] = [[]]
    used = 0
    for unit, size in enumerate(per_unit):
        if runs[-1] and used + size > token_budget:
            runs.append([])
            used = 0
        runs[-1].append(unit)
        used += size
    return [batch.units(run) for run in runs]
