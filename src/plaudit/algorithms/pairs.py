"""What methods of pairs share: rows come in twos, the chosen answer first.

Row (chosen), Row (rejected) -> loss by pair -> weight and sum
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import Data, LossFn, Objective, Output
from plaudit.batch import Batch
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class Pairs(Objective):
    """Base: nothing is sampled; the policy learns from labelled pairs."""

    data: ClassVar[Data] = "preferences"
    unit: ClassVar[int] = 2
    evaluated: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.preference}

    def preference(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Sum over pairs of weight * loss."""
        raise NotImplementedError


class Imitating(Pairs):
    """Base: the chosen answers are imitated too."""

    def weigh(self, batch: Batch) -> Batch:
        """Weigh each token of a chosen answer by its share of all of them, times its pair's weight; others by 0."""
        batch = super().weigh(batch)
        assert batch.row_weight is not None
        share = batch.row_weight[batch.row] * (batch.trainable & (batch.row % 2 == 0))
        return batch.with_columns(weight=share / share.sum().clamp(min=1e-12))


def likelihood(output: Output, batch: Batch) -> Tensor:
    """Negative log-likelihood of the chosen answers that `Imitating` weighed, a mean over tokens."""
    assert output.logprobs is not None and batch.weight is not None
    return -(output.logprobs * batch.weight).sum()


def by_pair(column: Tensor | None) -> tuple[Tensor, Tensor]:
    """The entries (p,) of chosen and of rejected rows, from a column (r,)."""
    assert column is not None
    pairs = column.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def pair_figures(margin: Tensor, weight: Tensor) -> Stats:
    """Weighted share of pairs ordered as labelled, where a tie counts half, and the mean margin."""
    right = (margin > 0).double() + 0.5 * (margin == 0).double()  # equal numbers of equal weights: equal shares
    return {"accuracy": float((right * weight).sum()), "margin": float((margin.detach() * weight).sum())}
