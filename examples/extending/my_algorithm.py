"""A method of your own: an answer is worth its rank among the answers to the same prompt, whatever the scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plaudit import PolicyGradient, register_algorithm
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import spread
from plaudit.batch import Batch
from plaudit.types import Stats


@dataclass(frozen=True)
class RankGradient(PolicyGradient):
    """`samples` completions of each prompt are sampled. Good is what beats more of its group than it loses to.
    Minimised is the clipped policy loss."""

    samples: int = 4
    power: float = 1.0
    """Below 1 the best and the worst stand out less."""

    def credit(self, batch: Batch, memory: dict[str, float]) -> tuple[Batch, Stats]:
        rewards = batch.reward
        same = batch.group[:, None] == batch.group  # (r, r)
        beats = (rewards[:, None] > rewards) & same
        share = (beats.sum(1) - beats.sum(0)) / (same.sum(1) - 1).clamp(min=1)  # (r,), in [-1, 1]
        advantage = torch.sign(share) * share.abs() ** self.power
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch)


register_algorithm("rank", RankGradient)
