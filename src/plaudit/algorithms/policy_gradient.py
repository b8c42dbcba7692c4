"""The base of PPO, GRPO, RLOO, ReMax, REINFORCE++ and distillation: clipped loss, its figures, sequence-level credit.

Batch -> credit (of the subclass) -> advantages -> weigh -> policy_loss (ratio, clip, KL) -> loss, figures
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from plaudit.algorithms.base import Algorithm, LossFn, Output, weighed
from plaudit.algorithms.figures import sampler_gap
from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.kl import ESTIMATORS, k1, weighted_k3
from plaudit.maths.losses import LEVELS, cispo, clip_fraction, clipped_policy, log_ratio, off_policy_weight
from plaudit.maths.ragged import row_sum
from plaudit.support.fields import setting
from plaudit.types import Role, Stats

CORRECTIONS = (
    "none",
    "truncate",
    "mask",
    "cispo",
    *(f"{level}_{how}" for level in LEVELS for how in ("truncate", "mask")),
)


@dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """Base: the policy is sampled, the subclass's `credit` gives advantages, and the clipped loss is minimised."""

    clip: tuple[float, float] = setting((0.2, 0.2), count=2, least=0, infinite=True)
    """How far the ratio may lie below and above 1 before it is clipped; DAPO takes [0.2, 0.28]."""
    dual_clip: float | None = setting(None, least=1)
    """Limit of a token's loss where A < 0, as a multiple of |A|; 3 is usual, null sets no limit."""
    ratio: str = setting("token", choices=LEVELS)
    """Level of the importance ratio: token, sequence (sum) or geometric (mean, GSPO)."""
    aggregation: str | int | float = setting("token", choices=("token", "sequence"), numbers=True, above=0)
    """Losses are averaged over tokens or sequences; a number divides each row's sum (Dr.GRPO: the longest answer)."""
    kl_in_loss: float = setting(0.0, least=0)
    """Coefficient of a KL term in the loss."""
    kl_estimator: str = setting("weighted_k3", choices=("weighted_k3", "k2", "k3"))
    """Estimator of the KL in the loss. weighted_k3: k3 times the differentiable ratio; its gradient is the KL's, for
    old samples too. k2: the same gradient without the ratio. k3: as in GRPO's paper; its gradient is that of
    KL(reference || policy). k1's gradient is zero on average: it belongs in a reward (kl_coefficient)."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy, which is subtracted from the loss."""
    epochs: int = setting(1, least=1)
    """Passes over each batch."""
    minibatches: int = setting(1, least=1)
    """Optimizer steps a pass."""
    early_stop_ratio: float | None = setting(None, least=1)
    """Skip an update and the rest of its batch if the mean importance ratio is above this or below 1 / this."""
    recompute_old: bool | None = None
    """Take ratios against the learner's own log-probs before the first update, not the sampler's (the decoupled
    objective of Hilton et al. 2022, https://arxiv.org/abs/2110.00641). null: only if samples may be older than the
    weights (rollout.max_lag) or another engine's."""
    correction: str = setting("truncate", choices=CORRECTIONS)
    """With recompute_old, weigh samples by w = learner / sampler: none, truncate (w is at most correction_cap) or mask
    (leave out those with w above the cap or below 1 / cap). w has `ratio`'s level unless the name has one, as
    sequence_mask. cispo replaces the clipped loss by -w A log pi, with a constant w = min(policy / sampler, cap)."""
    correction_cap: float = setting(2.0, least=1, infinite=True)
    """Largest w of `correction`; mask also leaves out w below 1 / this."""

    uses_ratio: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        if self.correction == "cispo" and (self.recompute_old or self.dual_clip is not None):
            yield "correction=cispo has no clip, its ratio is to the sampler: set recompute_old and dual_clip to null"

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.policy_loss}

    def adapted(self, *, off_policy: bool) -> Self:
        recompute = off_policy and self.correction != "cispo" if self.recompute_old is None else self.recompute_old
        return replace(self, recompute_old=recompute)

    def weigh(self, batch: Batch) -> Batch:
        return weighed(batch, self.aggregation)

    def updates(self) -> tuple[int, int]:
        return self.epochs, self.minibatches

    def halt(self, stats: Stats) -> str | None:
        limit, ratio = self.early_stop_ratio, stats.get("ratio/mean", 1.0)
        if limit is None or 1.0 / limit <= ratio <= limit:
            return None
        return f"mean importance ratio {ratio:.3g} is outside [{1 / limit:.3g}, {limit:.3g}]"

    def policy_loss(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Return sum(weight * (correction * clipped loss + KL term - entropy bonus)); weighted_k3 is corrected too."""
        current, entropy = output.logprobs, output.entropy
        weight, share, advantages = batch.weight, batch.token_share, batch.advantages
        assert current is not None and entropy is not None
        assert weight is not None and share is not None and advantages is not None
        low, high = self.clip
        change = log_ratio(current, batch.old, batch.trainable, batch.row, len(batch), level=self.ratio)
        if self.correction == "cispo":
            loss = cispo(change, current, advantages, cap=self.correction_cap)
            clipped = change > math.log(self.correction_cap)
        else:
            loss = clipped_policy(change, advantages, low=low, high=high, dual=self.dual_clip)
            clipped = clip_fraction(change.detach(), advantages, low=low, high=high)
        figures: Stats = {"clip_fraction": float((clipped * share).sum())}
        correction = self._correction(batch)
        if correction is not None:
            loss = loss * correction
            figures["correction/mean"] = float((correction * share).sum())
            figures["correction/min"] = float(correction.min())
        if self.kl_in_loss:
            kl = self._kl(current, batch)
            kl = kl if correction is None or self.kl_estimator != "weighted_k3" else correction * kl
            loss = loss + self.kl_in_loss * kl
            figures["kl/loss"] = float((kl.detach() * share).sum())
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * entropy
        total = (loss * weight).sum()
        with torch.no_grad():
            ratio = change.exp()
            figures |= {
                "loss/policy": float(total),
                "entropy": float((entropy * share).sum()),
                "ratio/mean": float((ratio * share).sum()),
                "ratio/max": float(ratio[batch.trainable].max()) if bool(batch.trainable.any()) else 1.0,
            }
        return total, figures | sampler_gap(current, batch)

    def _kl(self, current: Tensor, batch: Batch) -> Tensor:
        assert batch.reference is not None, "kl_in_loss needs reference log-probs"
        d = current - batch.reference
        if self.kl_estimator != "weighted_k3":
            return ESTIMATORS[self.kl_estimator](d)
        change = log_ratio(current, batch.old, batch.trainable, batch.row, len(batch), level="token")
        return weighted_k3(d, change)

    def _correction(self, batch: Batch) -> Tensor | None:
        if batch.proximal is None or batch.behaviour is None or self.correction == "none":
            return None
        place = batch.trainable, batch.row, len(batch)
        level, _, how = self.correction.rpartition("_")
        return off_policy_weight(
            batch.proximal, batch.behaviour, *place, level=level or self.ratio, how=how, cap=self.correction_cap
        )


def reference_kl(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return k1 to the reference on trained tokens (n,), 0 on others, and its sum over each answer (a,), in nats."""
    assert batch.reference is not None, "this method needs reference log-probs"
    kl = torch.where(batch.trainable, k1(batch.old - batch.reference), torch.zeros_like(batch.reference))
    answers = Answers(batch)
    return kl, row_sum(kl, answers.token, answers.count)


def spread(advantage: Tensor, batch: Batch) -> Tensor:
    """Return (n,): each trained token's advantage is that of its answer, from `advantage` (a,); other tokens have 0."""
    return advantage[Answers(batch).token] * batch.trainable
