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


def by_pair(column: Tensor | None) -> tuple[Tensor, Tensor]:
    """The entries (p,) of chosen and of rejected rows, from a column (r,)."""
    assert column is not None
    pairs = column.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def pair_figures(margin: Tensor, weight: Tensor) -> Stats:
    """Weighted share of pairs ordered as labelled, where a tie counts half, and the mean margin."""
    right = (margin > 0).float() + 0.5 * (margin == 0).float()
    return {"accuracy": float((right * weight).sum()), "margin": float((margin.detach() * weight).sum())}
