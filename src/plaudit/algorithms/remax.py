"""ReMax: REINFORCE with the greedy answer's reward as baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from plaudit.algorithms.base import Memory, check_range, row_of
from plaudit.algorithms.policy_gradient import PolicyGradient, credit_figures, reference_kl, spread
from plaudit.batch import Batch
from plaudit.maths.advantages import equal_groups
from plaudit.types import Group, Role, Row, Sampling, Stats


@dataclass(frozen=True)
class ReMax(PolicyGradient):
    """`samples` completions of each prompt are sampled, and one greedy one by the same policy version. Good is what
    beats the greedy answer's reward. Minimised is the clipped policy loss. Li et al. 2023,
    https://arxiv.org/abs/2310.10505."""

    kl_coefficient: float = 0.05
    """beta of the KL penalty in the sample's reward."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("kl_coefficient", self.kl_coefficient, 0.0)

    def plan(self, sampling: Sampling) -> list[Sampling]:
        greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        return [*super().plan(sampling), greedy]

    def rows(self, group: Group) -> list[Row]:
        *samples, greedy = group.responses
        if greedy.reward is None:
            return []
        return [row_of(group, sample, baseline=greedy.reward) for sample in samples if sample.reward is not None]

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.reward is not None and batch.baseline is not None
        _, kl = reference_kl(batch)
        advantage = batch.reward - self.kl_coefficient * kl - batch.baseline
        with_greedy = torch.cat((batch.reward, batch.baseline)), batch.group.repeat(2)
        figures = {"reward/greedy": float(batch.baseline.mean()), "groups/equal": equal_groups(*with_greedy)}
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch, kl=kl, grouped=False) | figures
