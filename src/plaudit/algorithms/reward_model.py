"""Reward model: a judge that learns which of two answers people prefer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import Data, LossFn, Objective, Output, check_range, pair_figures
from plaudit.batch import Batch
from plaudit.maths.losses import bradley_terry
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class RewardModel(Objective):
    """Nothing is sampled. Of each pair the chosen answer counts as good; minimised is -log sigma(r_c - r_r - margin),
    averaged over the pairs of a prompt, then over prompts."""

    centring: float = 0.0
    """c (r_c + r_r)^2 keeps scores around 0; 0.01 is usual, 0 is off."""

    data: ClassVar[Data] = "preferences"
    unit: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_range("centring", self.centring, 0.0)

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.JUDGE: self.preference}

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Sum over pairs of weight * Bradley-Terry loss."""
        assert output.scores is not None and batch.row_weight is not None and batch.margin is not None
        scores = output.scores.view(-1, 2)
        weight, margin = batch.row_weight.view(-1, 2)[:, 0], batch.margin.view(-1, 2)[:, 0]
        chosen, rejected = scores[:, 0], scores[:, 1]
        loss = (bradley_terry(chosen, rejected, margin, centring=self.centring) * weight).sum()
        mean = float((scores.detach().mean(1) * weight).sum())
        figures = {"loss/judge": float(loss.detach()), "score/mean": mean}
        return loss, figures | pair_figures((chosen - rejected).detach(), weight)
