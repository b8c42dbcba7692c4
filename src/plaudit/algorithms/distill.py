"""Distillation on the policy's own answers: a teacher stands in the reference's place.

Batch with the teacher's log-probs -> credit: log teacher - log policy of each token (+ group's reward) -> advantages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from plaudit.algorithms.base import Memory, Output
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl, spread
from plaudit.algorithms.rows import Answers, rows_of
from plaudit.batch import Batch
from plaudit.maths.advantages import group_centred, return_to_go
from plaudit.support.fields import setting
from plaudit.types import Group, Role, Row, Stats


@dataclass(frozen=True)
class Distill(PolicyGradient):
    """The policy, as the student, samples `samples` completions of each prompt. A token is good if the teacher finds it
    likelier than the student: its advantage is log pi_teacher - log pi. The clipped policy loss is minimised; before
    clipping its expected gradient is that of KL(student || teacher) of each token, given the tokens before it.

    Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649; Gu et al. 2023 (MiniLLM),
    https://arxiv.org/abs/2306.08543; Lu and Thinking Machines 2025, On-Policy Distillation.
    """

    discount: float = setting(0.0, least=0, most=1)
    """gamma: factor of a later token's KL for each trained token by which it comes later. 0: a token's advantage has
    only its own KL. 1: the gradient is that of the KL of whole answers (MiniLLM)."""
    reward_weight: float = setting(0.0, least=0)
    """Weight of an answer's reward, less its group's mean, in the advantage of its tokens; above 0 it needs samples >=
    2. 0: rewards are only shown, and none is needed."""

    whole_vocabulary: bool = False
    """Minimise each token's KL over the whole vocabulary, not its estimate by the sampled token: the gradient is the
    same on average, without the noise. The teacher must be whole in the policy's processes."""

    teachers: dict[str, str] = field(default_factory=dict)  # type: ignore[misc]
    """Teachers of the prompts of some sources: an entry of `data.train` -> a checkpoint, as `reference.path`, which
    teaches all others."""

    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})
    has_teacher: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.reward_weight > 0 and self.samples < 2:
            yield f"samples={self.samples} must be at least 2 with algorithm.reward_weight={self.reward_weight}"
        if self.whole_vocabulary and self.teachers:
            yield "whole_vocabulary=true compares with one teacher: leave algorithm.teachers empty"
        if self.whole_vocabulary and (self.discount or self.kl_in_loss):
            yield "whole_vocabulary=true has each token's KL in the loss: set discount and kl_in_loss to 0"

    @property
    def has_baseline(self) -> bool:  # type: ignore[override]
        return self.reward_weight > 0

    @property
    def uses_rewards(self) -> bool:  # type: ignore[override]
        return self.reward_weight > 0

    @property
    def reads_divergence(self) -> bool:  # type: ignore[override]
        return self.whole_vocabulary

    def rows(self, group: Group) -> list[Row]:
        """Return the rows of responses with a reward. Those to which none applies have rows too, unless their group is
        compared."""
        compared = self.reward_weight > 0 and any(one.reward is not None for one in group.responses)
        kept = [one for one in group.responses if one.reward is not None or not (compared or one.score.applicable)]
        source = group.prompt.source
        number = 1 + list(self.teachers).index(source) if source in self.teachers else 0
        return [replace(row, teacher=number) for one in kept for row in rows_of(group, one)]

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        kl, row_kl = reference_kl(batch)
        answers = Answers(batch)
        gain = torch.zeros_like(kl) if self.whole_vocabulary else -kl
        advantages = return_to_go(gain, batch.trainable, answers.token, answers.count, discount=self.discount)
        if self.reward_weight:
            centred = group_centred(answers.of(batch.reward), answers.of(batch.group), scale=False)
            advantages = advantages + self.reward_weight * spread(centred, batch)
        batch = batch.with_columns(advantages=advantages)
        return batch, credit_figures(batch, kl=row_kl, grouped=self.has_baseline)

    def policy_loss(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        if not self.whole_vocabulary:
            return super().policy_loss(output, batch)
        divergence = output.divergence
        assert output.logprobs is not None and divergence is not None
        assert batch.weight is not None and batch.token_share is not None
        if not self.reward_weight:  # no advantages, and so no gradient by the sampled tokens
            output = replace(output, logprobs=output.logprobs.detach())
        loss, figures = super().policy_loss(output, batch)
        loss = loss + (divergence * batch.weight).sum()
        kl = float((divergence.detach() * batch.token_share).sum())
        return loss, figures | {"loss/policy": float(loss.detach()), "kl/loss": kl}
