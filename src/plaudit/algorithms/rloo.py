"""REINFORCE leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Memory, check_range
from plaudit.algorithms.policy_gradient import PolicyGradient, credit_figures, reference_kl, spread
from plaudit.batch import Batch
from plaudit.maths.advantages import leave_one_out
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """`samples` completions of each prompt are sampled. Good is what beats the mean of the others of its group, each
    reward less its KL penalty. Minimised is the clipped policy loss, its ratio by token (`ratio=sequence
    aggregation=sequence` for the paper's: each answer one action). Ahmadian et al. 2024."""

    samples: int = 4
    kl_coefficient: float = 0.05
    """beta of the KL penalty; the penalty is inside the baseline."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("samples", self.samples, 2)
        check_range("kl_coefficient", self.kl_coefficient, 0.0)

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.reward is not None
        _, kl = reference_kl(batch)
        advantage = leave_one_out(batch.reward - self.kl_coefficient * kl, batch.group)
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch, kl=kl)
