"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Memory, Output, check_range, mean_where
from plaudit.algorithms.policy_gradient import PolicyGradient, credit_figures, reference_kl
from plaudit.batch import Batch
from plaudit.maths.advantages import generalised_advantages, token_rewards, whiten
from plaudit.maths.kl import adapted_coefficient
from plaudit.maths.losses import clipped_value
from plaudit.maths.moments import Moments
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """One completion a prompt is sampled. Good is what the critic did not expect: reward minus a KL penalty on every
    token, by GAE. Minimised are the clipped policy loss and the critic's clipped squared error. Ouyang et al. 2022."""

    minibatches: int = 4
    kl_coefficient: float = 0.05
    """beta of the KL penalty in the reward; the start value where it adapts."""
    kl_target: float | None = None
    """Adapt beta towards this KL a sequence, in nats; null keeps it fixed."""
    kl_horizon: float = 10_000.0
    """Sequences over which beta adapts, by a fifth at most; a step with more of them adapts it as one with so many."""
    discount: float = 1.0
    trace: float = 0.95
    """lambda of GAE."""
    bootstrap_unfinished: bool = True
    """Count the critic's value of what would follow an answer that was cut off, beside the reward or penalty that it is
    given. Where values are above 0 being cut off is then worth more than ending; false takes a cut for an end."""
    whiten_advantages: bool = True
    value_clip: float | None = 0.2
    value_coefficient: float = 0.1
    normalise_values: bool = False
    """Let the critic predict returns in units of their running mean and deviation."""
    normalisation_decay: float = 0.99

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE, Role.CRITIC})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("kl_coefficient", self.kl_coefficient, 0.0)
        check_range("kl_target", self.kl_target, 1e-8)
        if self.kl_target is not None:  # from 0, no factor leads away
            check_range("kl_coefficient (with kl_target)", self.kl_coefficient, 1e-8)
        check_range("kl_horizon", self.kl_horizon, 1.0)
        for name in ("discount", "trace", "normalisation_decay"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        check_range("value_clip", self.value_clip, 0.0)
        check_range("value_coefficient", self.value_coefficient, 0.0)

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.policy_loss, Role.CRITIC: self.value_loss}

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.reward is not None and batch.values is not None
        assert batch.bootstrap is not None and batch.truncated is not None
        beta = memory.get("kl_coefficient", self.kl_coefficient)
        kl, row_kl = reference_kl(batch)
        rewards = token_rewards(batch.reward, kl, batch.trainable, batch.row, coefficient=beta)
        moments = Moments(*(memory.get(f"values/{name}", 0.0) for name in ("first", "second", "debias")))
        values = batch.values * moments.std + moments.mean
        after = (batch.bootstrap * moments.std + moments.mean) * (batch.truncated & self.bootstrap_unfinished)
        advantages, returns = generalised_advantages(
            rewards, values, after, batch.trainable, batch.row, discount=self.discount, trace=self.trace
        )
        figures = {"kl/coefficient": beta, "explained_variance": _explained(values, returns, batch.trainable)}
        if self.normalise_values:
            seen = returns[batch.trainable]
            mean, square = float(seen.mean()), float(seen.square().mean())
            moments = moments.updated(mean, square, decay=self.normalisation_decay)
            memory.update({f"values/{name}": value for name, value in asdict(moments).items()})
            returns = torch.where(batch.trainable, (returns - moments.mean) / moments.std, 0.0)
        if self.kl_target is not None:
            memory["kl_coefficient"] = adapted_coefficient(
                beta, float(row_kl.mean()), target=self.kl_target, horizon=self.kl_horizon, sequences=len(batch)
            )
        if self.whiten_advantages:
            advantages = whiten(advantages, batch.trainable)
        batch = batch.with_columns(advantages=advantages, returns=returns)
        return batch, credit_figures(batch, kl=row_kl, grouped=False) | figures

    def value_loss(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """value_coefficient * mean over trained tokens of the clipped squared error."""
        assert output.values is not None and batch.values is not None
        assert batch.returns is not None and batch.token_share is not None
        losses = clipped_value(output.values, batch.values, batch.returns, clip=self.value_clip)
        loss = (losses * batch.token_share).sum()
        return self.value_coefficient * loss, {"loss/critic": float(loss.detach())}


def _explained(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one."""
    spread = returns[mask].var(correction=0)
    if not bool(spread > 0):
        return 0.0
    return 1.0 - mean_where((returns - values - (returns - values)[mask].mean()).square(), mask) / float(spread)
