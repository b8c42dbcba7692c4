"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Memory, Output
from plaudit.algorithms.figures import credit_figures, mean_where
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl
from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.advantages import generalised_advantages, token_rewards, whiten
from plaudit.maths.kl import adapted_coefficient
from plaudit.maths.losses import clipped_value
from plaudit.maths.moments import Moments
from plaudit.support.fields import setting
from plaudit.types import Role, Stats

NORMALISATION_DECAY = 0.99
"""Decay per step of the running mean and deviation of returns, which so cover about a hundred steps."""

KL_HORIZON = 10_000.0
"""`horizon` of `adapted_coefficient`: beta changes at most by a fifth over so many sequences (Ziegler et al. 2019)."""


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """One completion a prompt is sampled. A token is good if its return beats the critic's value (GAE); the return is
    the reward minus a KL penalty on every token. The clipped policy loss and the critic's clipped squared error are
    minimised. Ouyang et al. 2022."""

    minibatches: int = setting(4, least=1)
    kl_coefficient: float = setting(0.05, least=0)
    """beta of the KL penalty in the reward; its first value if kl_target is set."""
    kl_target: float | None = setting(None, above=0, unit="nats")
    """Adapt beta so that the KL of a sequence approaches this value; null keeps beta fixed."""
    discount: float = setting(1.0, least=0, most=1)
    """gamma: factor of a reward for each trained token by which it comes later."""
    trace: float = setting(0.95, least=0, most=1)
    """lambda of GAE."""
    whiten_advantages: bool = True
    """Give the step's advantages mean 0 and deviation 1."""
    value_clip: float | None = setting(0.2, least=0)
    """Clip a value's change since its rollout to at most this, up or down; null sets no limit."""
    value_coefficient: float = setting(0.1, least=0)
    """Factor of the critic's loss."""
    normalise_values: bool = False
    """Let the critic predict returns in units of their running mean and deviation."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE, Role.CRITIC})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.kl_target is not None and self.kl_coefficient == 0:
            yield "kl_coefficient=0.0 must be above 0 with algorithm.kl_target: from 0 no factor leads away"

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.policy_loss, Role.CRITIC: self.value_loss}

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.values is not None
        assert batch.bootstrap is not None and batch.continues is not None
        beta = memory.get("kl_coefficient", self.kl_coefficient)
        kl, row_kl = reference_kl(batch)
        answers = Answers(batch)
        rewards = token_rewards(
            answers.of(batch.reward), kl, batch.trainable, answers.token, coefficient=beta, process=batch.process
        )
        moments = Moments(*(memory.get(f"values/{name}", 0.0) for name in ("first", "second", "debias")))
        values = batch.values * moments.std + moments.mean
        after = answers.of((batch.bootstrap * moments.std + moments.mean) * batch.continues)
        advantages, returns = generalised_advantages(
            rewards, values, after, batch.trainable, answers.token, discount=self.discount, trace=self.trace
        )
        figures = {"kl/coefficient": beta, "explained_variance": _explained(values, returns, batch.trainable)}
        if self.normalise_values:
            trained_returns = returns[batch.trainable]
            mean, square = float(trained_returns.mean()), float(trained_returns.square().mean())
            moments = moments.updated(mean, square, decay=NORMALISATION_DECAY)
            memory.update({f"values/{name}": value for name, value in asdict(moments).items()})
            returns = torch.where(batch.trainable, (returns - moments.mean) / moments.std, 0.0)
        if self.kl_target is not None:
            memory["kl_coefficient"] = adapted_coefficient(
                beta, float(row_kl.mean()), target=self.kl_target, horizon=KL_HORIZON, sequences=answers.count
            )
        if self.whiten_advantages:
            advantages = whiten(advantages, batch.trainable)
        batch = batch.with_columns(advantages=advantages, returns=returns)
        return batch, credit_figures(batch, kl=row_kl, grouped=False) | figures

    def value_loss(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Return value_coefficient * (mean over trained tokens of the clipped squared error)."""
        assert output.values is not None and batch.values is not None
        assert batch.returns is not None and batch.token_share is not None
        losses = clipped_value(output.values, batch.values, batch.returns, clip=self.value_clip)
        loss = (losses * batch.token_share).sum()
        return self.value_coefficient * loss, {"loss/critic": float(loss.detach())}


def _explained(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one or without variance of R."""
    spread = returns[mask].var(correction=0)
    if not bool(spread > 0):
        return 0.0
    return 1.0 - mean_where((returns - values - (returns - values)[mask].mean()).square(), mask) / float(spread)
