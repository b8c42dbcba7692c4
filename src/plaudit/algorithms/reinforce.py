"""REINFORCE++ and its baseline variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Memory, check_range
from plaudit.algorithms.policy_gradient import PolicyGradient, credit_figures, reference_kl
from plaudit.batch import Batch
from plaudit.maths.advantages import group_centred, return_to_go, token_rewards, whiten
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class Reinforce(PolicyGradient):
    """REINFORCE++: one completion a prompt is sampled. Good is a high return (reward minus a KL penalty on every later
    token) for the whole batch, whitened over it; no critic. Minimised is the clipped policy loss.
    With `group_baseline` several are sampled and the group's mean reward is taken off first. Hu et al. 2025,
    https://arxiv.org/abs/2501.03262."""

    kl_coefficient: float = 0.05
    discount: float = 1.0
    group_baseline: bool = False
    """REINFORCE++-baseline; needs samples >= 2."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("kl_coefficient", self.kl_coefficient, 0.0)
        check_range("discount", self.discount, 0.0, 1.0)
        if self.group_baseline:
            check_range("samples (with group_baseline)", self.samples, 2)

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.reward is not None
        kl, row_kl = reference_kl(batch)
        reward = group_centred(batch.reward, batch.group, scale=False) if self.group_baseline else batch.reward
        rewards = token_rewards(reward, kl, batch.trainable, batch.row, coefficient=self.kl_coefficient)
        returns = return_to_go(rewards, batch.trainable, batch.row, len(batch), discount=self.discount)
        batch = batch.with_columns(advantages=whiten(returns, batch.trainable))
        return batch, credit_figures(batch, kl=row_kl, grouped=self.group_baseline)
