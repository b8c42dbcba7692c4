"""Kahneman-Tversky optimisation, from answers that are each labelled good or bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from plaudit.algorithms.base import Data, LossFn, Objective, Output, weighed
from plaudit.algorithms.pairs import pair_figures
from plaudit.batch import Batch
from plaudit.maths.aggregate import Aggregation
from plaudit.maths.losses import kto, kto_reference_point
from plaudit.maths.ragged import row_sum
from plaudit.support.fields import setting
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class KTO(Objective):
    """Nothing is sampled. Each answer is labelled good or bad and needs no other answer to its prompt. The loss is
    1 - sigma(beta side): `side` is how far the log-ratio to the reference is on the labelled side of z0, an estimate of
    the policy's KL. Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.

    Rows come in twos: a judged answer, and its prompt with an answer to another prompt. The second rows of the whole
    step give z0 and are then dropped, so that a step trains only the judged answers.
    """

    beta: float = setting(0.1, above=0)
    """Strength of the pull to the reference."""
    desirable: float = setting(1.0, least=0)
    """lambda_D, the weight of good answers. The paper keeps lambda_D n_D / (lambda_U n_U) between 1 and 4/3."""
    undesirable: float = setting(1.0, least=0)
    """lambda_U, the weight of bad answers."""

    data: ClassVar[Data] = "judgements"
    asks: ClassVar[frozenset[Role]] = frozenset({Role.REFERENCE})
    unit: ClassVar[int] = 2
    evaluated: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def contradictions(self) -> Iterator[str]:
        if self.desirable == self.undesirable == 0:
            yield "desirable=0 and algorithm.undesirable=0 leave nothing to learn from: set one of them above 0"

    @property
    def recompute_old(self) -> bool:
        """Always True: z0 is computed from the policy's log-probs before the step."""
        return True

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.judged}

    def weigh(self, batch: Batch) -> Batch:
        """Return only the judged rows, weighed over all of them, with the step's z0 in `baseline`."""
        assert batch.reference is not None
        ratio = row_sum((batch.old - batch.reference) * batch.trainable, batch.row, len(batch))
        there = row_sum(batch.trainable.float(), batch.row, len(batch)) > 0
        z0 = kto_reference_point(ratio[1::2], there[1::2])
        judged = replace(batch.select(torch.arange(0, len(batch), 2)), unit=1)
        return weighed(judged.with_columns(baseline=z0.expand(len(judged))), Aggregation.TOKEN)

    def judged(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Return the sum over answers of weight * lambda * loss, and figures."""
        assert output.logprobs is not None and batch.reference is not None and batch.row_weight is not None
        assert batch.reward is not None and batch.baseline is not None
        good = batch.reward > 0
        ratio = row_sum((output.logprobs - batch.reference) * batch.trainable, batch.row, len(batch))
        side = torch.where(good, ratio - batch.baseline, batch.baseline - ratio)
        factor = torch.where(good, self.desirable, self.undesirable)
        loss = (kto(side, beta=self.beta) * factor * batch.row_weight).sum()
        right = pair_figures(side.detach(), batch.row_weight)["accuracy"]
        z0 = float((batch.baseline * batch.row_weight).sum())
        return loss, {"loss/policy": float(loss.detach()), "accuracy": right, "kl/mismatched": z0}
