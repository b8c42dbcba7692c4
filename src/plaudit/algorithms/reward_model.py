"""Reward model: a judge that learns which of two answers people prefer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from plaudit.algorithms.base import LossFn, Output
from plaudit.algorithms.pairs import Pairs, by_pair, pair_figures
from plaudit.batch import Batch
from plaudit.maths.losses import bradley_terry
from plaudit.support.fields import setting
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class RewardModel(Pairs):
    """Nothing is sampled. The chosen answer of each pair is good. The loss -log sigma(r_c - r_r - margin) is minimised,
    averaged over the pairs of a prompt, then over prompts."""

    centring: float = setting(0.0, least=0)
    """c: the loss gets a term c (r_c + r_r)^2, which keeps scores around 0; 0.01 is usual, 0 is off."""

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.JUDGE: self.preference}

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        (chosen, rejected), (weight, _) = by_pair(output.scores), by_pair(batch.row_weight)
        margin, _ = by_pair(batch.margin)
        loss = (bradley_terry(chosen, rejected, margin, centring=self.centring) * weight).sum()
        mean = float(((chosen + rejected).detach() / 2 * weight).sum())
        figures = {"loss/judge": float(loss.detach()), "score/mean": mean}
        return loss, figures | pair_figures((chosen - rejected).detach(), weight)
