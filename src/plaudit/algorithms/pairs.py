"""The base of methods that learn from pairs: rows come in twos, the chosen answer first.

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
        """Return the sum over pairs of weight * loss, and figures."""
        raise NotImplementedError


class Imitating(Pairs):
    """Base of methods that also maximise the likelihood of the chosen answers (ORPO, SimPO)."""

    def weigh(self, batch: Batch) -> Batch:
        """Weigh each trained token of a chosen answer by its pair's weight, scaled to sum to 1; other tokens by 0."""
        batch = super().weigh(batch)
        assert batch.row_weight is not None
        share = batch.row_weight[batch.row] * (batch.trainable & (batch.row % 2 == 0))
        return batch.with_columns(weight=share / share.sum().clamp(min=1e-12))


def likelihood(output: Output, batch: Batch) -> Tensor:
    """Return the chosen answers' negative log-likelihood, averaged over tokens with the weights of `Imitating`."""
    assert output.logprobs is not None and batch.weight is not None
    return -(output.logprobs * batch.weight).sum()


def by_pair(column: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the entries of chosen rows (p,) and of rejected rows (p,), from a column (r,) with r = 2 p."""
    assert column is not None
    pairs = column.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def pair_figures(margin: Tensor, weight: Tensor) -> Stats:
    """Return `accuracy`, the weighted share of pairs ordered as labelled (a tie counts half), and mean `margin`."""
    right = (margin > 0).double() + 0.5 * (margin == 0).double()  # equal weights then give equal shares
    return {"accuracy": float((right * weight).sum()), "margin": float((margin.detach() * weight).sum())}
