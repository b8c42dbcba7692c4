"""Online DPO: the pairs are the policy's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Algorithm, Data, check_range, row_of, scored
from plaudit.algorithms.dpo import DPO
from plaudit.types import Group, Row, Sampling


@dataclass(frozen=True)
class OnlineDPO(DPO, Algorithm):
    """`samples` completions of each prompt are sampled. The best by reward is chosen over the worst; minimised is the
    DPO loss of that pair. A group whose best and worst tie says nothing and is dropped. Guo et al. 2024,
    https://arxiv.org/abs/2402.04792; Noukhovitch et al. 2024, https://arxiv.org/abs/2410.18252."""

    samples: int = 4

    data: ClassVar[Data] = "prompts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("samples", self.samples, 2)

    def plan(self, sampling: Sampling) -> list[Sampling]:
        return [sampling] * self.samples

    def rows(self, group: Group) -> list[Row]:
        ranked = sorted(scored(group.responses), key=lambda pair: pair[0])
        if len(ranked) < 2 or ranked[0][0] == ranked[-1][0]:
            return []
        return [row_of(group, ranked[-1][1]), row_of(group, ranked[0][1])]
