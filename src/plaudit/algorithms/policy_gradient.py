"""What PPO, GRPO, RLOO, ReMax and REINFORCE++ share: the clipped loss, its figures, and sequence-level credit.

They differ in `credit`, which fills `advantages`. The loss, its aggregation and the early stop stand here once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from plaudit.algorithms.base import (
    Algorithm,
    LossFn,
    Output,
    check_choice,
    check_range,
    mean_where,
    sampler_gap,
    weighed,
)
from plaudit.batch import Batch
from plaudit.maths.advantages import equal_groups
from plaudit.maths.aggregate import Aggregation
from plaudit.maths.kl import ESTIMATORS, k1
from plaudit.maths.losses import clip_fraction, clipped_policy, log_ratio, off_policy_weight
from plaudit.maths.ragged import row_sum
from plaudit.types import Role, Sampling, Stats


@dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """Base: samples of the policy, advantages by the child's `credit`, the clipped loss minimised."""

    samples: int = 1
    """Completions a prompt."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio earns nothing outside [1 - clip_low, 1 + clip_high]; DAPO raises the upper one to 0.28."""
    dual_clip: float | None = None
    """At most this multiple of |A| is lost where A < 0 (3 is usual)."""
    ratio: str = "token"
    """Level of the importance ratio: token, sequence (sum) or geometric (mean, GSPO)."""
    aggregation: str = "token"
    """token, sequence or constant: how tokens make up the loss."""
    constant: float = 1.0
    """Divisor of a row's sum under `aggregation=constant`; Dr.GRPO takes the longest answer allowed."""
    kl_in_loss: float = 0.0
    """Coefficient of a KL term in the loss."""
    kl_estimator: str = "k3"
    """Estimator of that term: k3, or k2, whose gradient is that of the KL itself."""
    entropy_bonus: float = 0.0
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Optimizer steps a pass."""
    early_stop_ratio: float | None = None
    """Skip an update and the rest of its batch once the mean importance ratio passes this (or falls below 1 / it)."""
    recompute_old: bool | None = None
    """Take ratios against the learner's own log-probs before the first update, not the sampler's (the decoupled
    objective of Hilton et al. 2022, https://arxiv.org/abs/2110.00641). null: where samples may be older than the
    weights (rollout.max_lag) or another engine's."""
    correction: str = "truncate"
    """With recompute_old, samples weigh learner / sampler: none, truncate (each token, at most correction_cap) or mask
    (rows whose whole ratio is beyond correction_cap, either way, are left out)."""
    correction_cap: float = 2.0

    uses_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, tuple(Aggregation))
        check_choice("ratio", self.ratio, ("token", "sequence", "geometric"))
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator=k1 has no effect in a loss: its gradient is zero on average. k1 belongs in a "
                "reward (kl_coefficient); set kl_estimator to k2, whose gradient is that of the KL itself, or to k3"
            )
        check_choice("correction", self.correction, ("none", "truncate", "mask"))
        check_range("correction_cap", self.correction_cap, 1.0, infinite=True)
        check_choice("kl_estimator", self.kl_estimator, ("k2", "k3"))
        check_range("samples", self.samples, 1)
        check_range("clip_low", self.clip_low, 0.0, 1.0)
        check_range("clip_high", self.clip_high, 0.0, infinite=True)
        check_range("dual_clip", self.dual_clip, 1.0)
        check_range("constant", self.constant, 1e-8)
        check_range("kl_in_loss", self.kl_in_loss, 0.0)
        if not math.isfinite(self.entropy_bonus):
            raise ValueError(f"entropy_bonus={self.entropy_bonus} must be finite")
        check_range("epochs", self.epochs, 1)
        check_range("minibatches", self.minibatches, 1)
        check_range("early_stop_ratio", self.early_stop_ratio, 1.0)

    def plan(self, sampling: Sampling) -> list[Sampling]:
        return [sampling] * self.samples

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.policy_loss}

    def adapted(self, *, off_policy: bool) -> Self:
        return replace(self, recompute_old=off_policy) if self.recompute_old is None else self

    def weigh(self, batch: Batch) -> Batch:
        return weighed(batch, Aggregation(self.aggregation), constant=self.constant)

    def updates(self) -> tuple[int, int]:
        return self.epochs, self.minibatches

    def halt(self, stats: Stats) -> str | None:
        limit, ratio = self.early_stop_ratio, stats.get("ratio/mean", 1.0)
        if limit is None or 1.0 / limit <= ratio <= limit:
            return None
        return f"mean importance ratio {ratio:.3g} is outside [{1 / limit:.3g}, {limit:.3g}]"

    def policy_loss(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Sum of weight * (correction * clipped loss + KL term - entropy bonus)."""
        current, entropy = output.logprobs, output.entropy
        weight, share, advantages = batch.weight, batch.token_share, batch.advantages
        assert current is not None and entropy is not None
        assert weight is not None and share is not None and advantages is not None
        change = log_ratio(current, batch.old, batch.trainable, batch.row, len(batch), level=self.ratio)
        loss = clipped_policy(change, advantages, low=self.clip_low, high=self.clip_high, dual=self.dual_clip)
        figures: Stats = {}
        if batch.proximal is not None and batch.behaviour is not None and self.correction != "none":
            correction = self._correction(batch, batch.proximal, batch.behaviour)
            loss = loss * correction
            figures["correction/mean"] = float((correction * share).sum())
            figures["correction/min"] = float(correction.min())
        if self.kl_in_loss:
            assert batch.reference is not None, "kl_in_loss needs reference log-probs"
            kl = ESTIMATORS[self.kl_estimator](current - batch.reference)
            loss = loss + self.kl_in_loss * kl
            figures["kl/loss"] = float((kl.detach() * share).sum())
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * entropy
        total = (loss * weight).sum()
        with torch.no_grad():
            clipped = clip_fraction(change, advantages, low=self.clip_low, high=self.clip_high)
            ratio = change.exp()
            figures |= {
                "loss/policy": float(total),
                "entropy": float((entropy * share).sum()),
                "ratio/mean": float((ratio * share).sum()),
                "ratio/max": float(ratio[batch.trainable].max()) if bool(batch.trainable.any()) else 1.0,
                "clip_fraction": float((clipped * share).sum()),
            }
        return total, figures | sampler_gap(current, batch)

    def _correction(self, batch: Batch, proximal: Tensor, behaviour: Tensor) -> Tensor:
        return off_policy_weight(
            proximal,
            behaviour,
            batch.trainable,
            batch.row,
            len(batch),
            how=self.correction,
            cap=self.correction_cap,
        )


def reference_kl(batch: Batch) -> tuple[Tensor, Tensor]:
    """k1 against the reference on trained tokens (n,), and its sum over each row (r,)."""
    assert batch.reference is not None, "this method needs reference log-probs"
    kl = torch.where(batch.trainable, k1(batch.old - batch.reference), torch.zeros_like(batch.reference))
    return kl, row_sum(kl, batch.row, len(batch))


def spread(advantage: Tensor, batch: Batch) -> Tensor:
    """One advantage a row (r,) on each of its trained tokens (n,)."""
    return advantage[batch.row] * batch.trainable


def credit_figures(batch: Batch, *, kl: Tensor | None = None, grouped: bool = True) -> Stats:
    """Figures of the credit step: what was rewarded, how far the policy is from the reference, what is left to learn.

    `kl` is the per-row sum of k1; `grouped` says that answers are compared with their group's, so that equal ones
    carry no signal.
    """
    assert batch.reward is not None and batch.advantages is not None
    lengths = row_sum(batch.trainable.float(), batch.row, len(batch))
    stats = {
        "advantage/mean": mean_where(batch.advantages, batch.trainable),
        "advantage/std": float(batch.advantages[batch.trainable].std()) if int(batch.trainable.sum()) > 1 else 0.0,
        "length/trained": float(lengths.mean()),
    }
    if grouped:
        stats["groups/equal"] = equal_groups(batch.reward, batch.group)
    if kl is not None:
        stats["kl/reference"] = float(kl.mean())
    return stats
