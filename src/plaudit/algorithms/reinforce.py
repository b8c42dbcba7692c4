"""REINFORCE++ and its baseline variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Memory
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl
from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.advantages import group_centred, return_to_go, token_rewards, whiten
from plaudit.support.fields import setting
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class Reinforce(PolicyGradient):
    """REINFORCE++: one completion a prompt is sampled. A token is good if its return is high for the batch; the return
    is the reward minus a KL penalty on every later token. Returns are whitened, and there is no critic. The clipped
    policy loss is minimised. With `group_baseline` several completions are sampled and the group's mean reward is
    subtracted first. Hu et al. 2025, https://arxiv.org/abs/2501.03262."""

    kl_coefficient: float = setting(0.05, least=0)
    """beta of the KL penalty in the reward."""
    discount: float = setting(1.0, least=0, most=1)
    """gamma: factor of a reward for each trained token by which it comes later."""
    group_baseline: bool = False
    """REINFORCE++-baseline; needs samples >= 2."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.group_baseline and self.samples < 2:
            yield f"samples={self.samples} must be at least 2 with algorithm.group_baseline=true"

    @property
    def has_baseline(self) -> bool:  # type: ignore[override]
        return self.group_baseline

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        kl, row_kl = reference_kl(batch)
        answers = Answers(batch)
        reward = answers.of(batch.reward)
        if self.group_baseline:
            reward = group_centred(reward, answers.of(batch.group), scale=False)
        rewards = token_rewards(
            reward,
            kl,
            batch.trainable,
            answers.token,
            coefficient=self.kl_coefficient,
            process=batch.process,
        )
        returns = return_to_go(rewards, batch.trainable, answers.token, answers.count, discount=self.discount)
        batch = batch.with_columns(advantages=whiten(returns, batch.trainable))
        return batch, credit_figures(batch, kl=row_kl, grouped=self.group_baseline)
