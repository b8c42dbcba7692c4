"""REINFORCE leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Memory
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl, spread
from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.advantages import leave_one_out
from plaudit.support.fields import setting
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """`samples` completions of each prompt are sampled. An answer is good if its reward less its KL penalty beats the
    mean of the others in its group. The clipped policy loss is minimised, with a ratio by token. In the paper each
    answer is one action: `ratio=sequence aggregation=sequence`. Ahmadian et al. 2024."""

    samples: int = setting(4, least=2)
    kl_coefficient: float = setting(0.05, least=0)
    """beta of the KL penalty, which is subtracted from each reward before the baseline is computed."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})
    has_baseline: ClassVar[bool] = True

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        _, kl = reference_kl(batch)
        answers = Answers(batch)
        advantage = leave_one_out(answers.of(batch.reward) - self.kl_coefficient * kl, answers.of(batch.group))
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch, kl=kl)
