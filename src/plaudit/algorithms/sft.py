"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import Data, LossFn, Objective, Output
from plaudit.algorithms.figures import sampler_gap
from plaudit.batch import Batch
from plaudit.types import Role, Stats


@dataclass(frozen=True)
class SFT(Objective):
    """Nothing is sampled. A demonstration's completion is good, its end token included. The mean negative
    log-likelihood of its tokens is minimised. The prompt is read, not trained."""

    data: ClassVar[Data] = "demonstrations"

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: likelihood}


def likelihood(output: Output, batch: Batch) -> tuple[Tensor, Stats]:
    """Return -(sum over tokens of weight * log pi), and figures."""
    assert output.logprobs is not None and output.entropy is not None
    assert batch.weight is not None and batch.token_share is not None
    loss = -(output.logprobs * batch.weight).sum()
    entropy = float((output.entropy.detach() * batch.token_share).sum())
    return loss, {"loss/policy": float(loss.detach()), "entropy": entropy} | sampler_gap(output.logprobs, batch)
