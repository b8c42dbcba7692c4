"""Direct preference optimisation, from pairs that were collected before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import (
    Data,
    LossFn,
    Objective,
    Output,
    check_choice,
    check_range,
    pair_figures,
    sampler_gap,
)
from plaudit.batch import Batch
from plaudit.maths.losses import dpo_hinge, dpo_robust, dpo_sigmoid, ipo, preference_margin
from plaudit.types import Role, Stats

VARIANTS = ("sigmoid", "ipo", "hinge", "robust")


@dataclass(frozen=True)
class DPO(Objective):
    """Nothing is sampled. Of each pair the chosen answer counts as good; minimised is a convex loss of h, by how much
    more the policy than the reference prefers the chosen answer. Rafailov et al. 2023."""

    loss: str = "sigmoid"
    """sigmoid, ipo, hinge or robust."""
    beta: float = 0.1
    """How closely the reference is kept: the larger, the closer."""
    label_smoothing: float = 0.0
    """Assumed share of flipped labels: conservative DPO under `sigmoid`, needed (> 0) by `robust`."""
    length_average: bool = False
    """IPO on log-ratios averaged over each answer's tokens, as its authors ran it, instead of summed."""

    data: ClassVar[Data] = "preferences"
    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})
    unit: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, VARIANTS)
        check_range("beta", self.beta, 1e-8)
        check_range("label_smoothing", self.label_smoothing, 0.0, 0.499)
        if self.label_smoothing and self.loss in ("ipo", "hinge"):
            raise ValueError(f"label_smoothing={self.label_smoothing} has no meaning for loss={self.loss}: set it to 0")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError(
                "loss=robust needs label_smoothing above 0: give the share of flipped labels, or use sigmoid"
            )
        if self.length_average and self.loss != "ipo":
            raise ValueError(f"length_average=true has no meaning for loss={self.loss}: set it to false, or loss=ipo")

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.preference}

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Sum over pairs of weight * loss(h)."""
        assert output.logprobs is not None and batch.reference is not None and batch.row_weight is not None
        h = preference_margin(
            output.logprobs, batch.reference, batch.trainable, batch.row, len(batch), average=self.length_average
        )
        weight = batch.row_weight.view(-1, 2)[:, 0]
        loss = (self._of_margin(h) * weight).sum()
        figures = pair_figures(self.beta * h.detach(), weight) | sampler_gap(output.logprobs, batch)
        return loss, {"loss/policy": float(loss.detach())} | figures

    def _of_margin(self, h: Tensor) -> Tensor:
        if self.loss == "ipo":
            return ipo(h, beta=self.beta)
        if self.loss == "hinge":
            return dpo_hinge(h, beta=self.beta)
        if self.loss == "robust":
            return dpo_robust(h, beta=self.beta, smoothing=self.label_smoothing)
        return dpo_sigmoid(h, beta=self.beta, smoothing=self.label_smoothing)
