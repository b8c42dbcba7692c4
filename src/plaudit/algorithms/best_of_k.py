"""Best of k: supervised fine-tuning on the policy's own best answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plaudit.algorithms.base import Algorithm, Data, LossFn, Output, scored
from plaudit.algorithms.rows import pickable, row_of
from plaudit.algorithms.sft import SFT, likelihood
from plaudit.batch import Batch
from plaudit.maths.kl import k2
from plaudit.support.fields import setting
from plaudit.types import Group, Role, Row, Stats


@dataclass(frozen=True)
class BestOfK(SFT, Algorithm):
    """`samples` completions of each prompt are sampled. The one with the highest reward is good, and its negative
    log-likelihood is minimised, with a KL term if `kl_in_loss` is set. If several have the highest reward, the first
    is taken."""

    samples: int = setting(4, least=1)
    kl_in_loss: float = setting(0.0, least=0)
    """Coefficient of a KL term (k2) on the best answers' tokens. A token that the policy prefers to the reference by
    1 / kl_in_loss nats is pushed no further."""

    data: ClassVar[Data] = "prompts"

    @property
    def asks(self) -> frozenset[Role]:  # type: ignore[override]
        return frozenset({Role.REFERENCE}) if self.kl_in_loss else frozenset()

    def losses(self) -> Mapping[Role, LossFn]:
        return {Role.POLICY: self.anchored if self.kl_in_loss else likelihood}

    def rows(self, group: Group) -> list[Row]:
        ranked = sorted(scored(pickable(group.responses)), key=lambda pair: pair[0], reverse=True)
        return [row_of(group, best) for _, best in ranked[:1]]

    def anchored(self, output: Output, batch: Batch) -> tuple[Tensor, Stats]:
        """Return the sum over tokens of weight * (kl_in_loss * k2 - log pi), and figures."""
        loss, figures = likelihood(output, batch)
        assert output.logprobs is not None and batch.reference is not None and batch.weight is not None
        kl = (k2(output.logprobs - batch.reference) * batch.weight).sum()
        loss = loss + self.kl_in_loss * kl
        return loss, figures | {"loss/policy": float(loss.detach()), "kl/loss": float(kl.detach())}
