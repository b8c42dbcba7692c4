"""Best of k: supervised fine-tuning on the policy's own best answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Algorithm, Data, row_of, scored
from plaudit.algorithms.sft import SFT
from plaudit.support.fields import setting
from plaudit.types import Group, Row


@dataclass(frozen=True)
class BestOfK(SFT, Algorithm):
    """`samples` completions of each prompt are sampled. The one with the highest reward is good, and its negative
    log-likelihood is minimised. The first of equally good ones is taken: they are exchangeable draws."""

    samples: int = setting(4, least=1)

    data: ClassVar[Data] = "prompts"

    def rows(self, group: Group) -> list[Row]:
        candidates = scored(group.responses)
        if not candidates:
            return []
        return [row_of(group, max(candidates, key=lambda pair: pair[0])[1])]
