"""ReMax: REINFORCE with the greedy answer's reward as baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from plaudit.algorithms.base import Memory, scored
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl, spread
from plaudit.algorithms.rows import Answers, rows_of
from plaudit.batch import Batch
from plaudit.maths.advantages import equal_groups, group_centred
from plaudit.support.fields import setting
from plaudit.types import Group, Role, Row, Sampling, Stats


@dataclass(frozen=True)
class ReMax(PolicyGradient):
    """`samples` completions of each prompt are sampled, and a greedy one by the same policy version. An answer is good
    if it beats the greedy one's reward by more than answers do on average. The clipped policy loss is minimised. Li et
    al. 2023, https://arxiv.org/abs/2310.10505."""

    kl_coefficient: float = setting(0.05, least=0)
    """beta of the KL penalty in the sample's reward."""
    centre_advantages: bool = True
    """Subtract the advantages' mean over the step's answers. The paper does not (false): since greedy answers score
    well above the mean of samples, nearly every sampled token is then pushed down."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})
    has_baseline: ClassVar[bool] = True

    def plan(self, sampling: Sampling) -> list[Sampling]:
        greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        return [*super().plan(sampling), greedy]

    def rows(self, group: Group) -> list[Row]:
        *samples, greedy = group.responses
        if greedy.reward is None:
            return []
        return [row for _, one in scored(samples) for row in rows_of(group, one, baseline=greedy.reward)]

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        _, kl = reference_kl(batch)
        reward, baseline, group = map(Answers(batch).of, (batch.reward, batch.baseline, batch.group))
        advantage = reward - self.kl_coefficient * kl - baseline
        if self.centre_advantages and len(reward) > 1:
            advantage = group_centred(advantage, torch.zeros_like(group), scale=False)
        with_greedy = torch.cat((reward, baseline)), group.repeat(2)
        figures = {"reward/greedy": float(baseline.mean()), "groups/equal": equal_groups(*with_greedy)}
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch, kl=kl, grouped=False) | figures
