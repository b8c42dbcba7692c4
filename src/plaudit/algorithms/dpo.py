"""Direct preference optimisation, from pairs that were collected before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import Output
from plaudit.algorithms.figures import sampler_gap
from plaudit.algorithms.pairs import Pairs, by_pair, pair_figures
from plaudit.batch import Batch
from plaudit.maths.losses import dpo_hinge, dpo_robust, dpo_sigmoid, ipo, preference_margin
from plaudit.maths.ragged import row_sum
from plaudit.support.fields import setting
from plaudit.types import Role, Stats

VARIANTS = ("sigmoid", "ipo", "hinge", "robust")


@dataclass(frozen=True)
class DPO(Pairs):
    """Nothing is sampled. The chosen answer of each pair is good. A convex loss of h is minimised: h is how much more
    the policy than the reference prefers the chosen answer. Rafailov et al. 2023."""

    loss: str = setting("sigmoid", choices=VARIANTS)
    """Convex loss of h."""
    beta: float = setting(0.1, above=0)
    """Strength of the pull to the reference."""
    label_smoothing: float = setting(0.0, least=0, below=0.5)
    """Assumed share of flipped labels: conservative DPO under `sigmoid`, needed (> 0) by `robust`."""
    length_average: bool = False
    """IPO on log-ratios averaged over each answer's tokens, as its authors ran it, instead of summed."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})

    def contradictions(self) -> Iterator[str]:
        if self.label_smoothing and self.loss in ("ipo", "hinge"):
            yield f"label_smoothing={self.label_smoothing} has no meaning for algorithm.loss={self.loss}: set it to 0"
        if self.loss == "robust" and not self.label_smoothing:
            yield "loss=robust needs label_smoothing above 0: give the share of flipped labels, or use sigmoid"
        if self.length_average and self.loss != "ipo":
            yield f"length_average=true has no meaning for algorithm.loss={self.loss}: set it to false, or loss=ipo"

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        assert output.logprobs is not None and batch.reference is not None
        h = preference_margin(
            output.logprobs, batch.reference, batch.trainable, batch.row, len(batch), average=self.length_average
        )
        weight, _ = by_pair(batch.row_weight)
        loss = (self._of_margin(h) * weight).sum()
        figures = pair_figures(self.beta * h.detach(), weight) | sampler_gap(output.logprobs, batch)
        ratios = row_sum((output.logprobs.detach() - batch.reference) * batch.trainable, batch.row, len(batch))
        figures["logratio/chosen"] = float((by_pair(ratios)[0] * weight).sum())
        return loss, {"loss/policy": float(loss.detach())} | figures

    def _of_margin(self, h: Tensor) -> Tensor:
        if self.loss == "ipo":
            return ipo(h, beta=self.beta)
        if self.loss == "hinge":
            return dpo_hinge(h, beta=self.beta)
        if self.loss == "robust":
            return dpo_robust(h, beta=self.beta, smoothing=self.label_smoothing)
        return dpo_sigmoid(h, beta=self.beta, smoothing=self.label_smoothing)
