"""Best of k: supervised fine-tuning on the policy's own best answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Algorithm, Data, check_range, row_of, scored
from plaudit.algorithms.sft import SFT
from plaudit.types import Group, Row, Sampling


@dataclass(frozen=True)
class BestOfK(SFT, Algorithm):
    """`samples` completions of each prompt are sampled. The one of highest reward counts as good; minimised is its
    negative log-likelihood. Of equal best ones the first is taken: they are exchangeable draws."""

    samples: int = 4

    data: ClassVar[Data] = "prompts"

    def __post_init__(self) -> None:
        check_range("samples", self.samples, 1)

    def plan(self, sampling: Sampling) -> list[Sampling]:
        return [sampling] * self.samples

    def rows(self, group: Group) -> list[Row]:
        candidates = scored(group.responses)
        if not candidates:
            return []
        return [row_of(group, max(candidates, key=lambda pair: pair[0])[1])]
