"""Online DPO: the pairs are the policy's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Algorithm, Data, scored
from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.rows import pickable, row_of
from plaudit.support.fields import setting
from plaudit.types import Group, Row


@dataclass(frozen=True)
class OnlineDPO(DPO, Algorithm):
    """`samples` completions of each prompt are sampled. The best by reward is chosen, the worst rejected. The DPO loss
    of that pair is minimised. A group whose best and worst tie carries no signal and is dropped. Guo et al. 2024,
    https://arxiv.org/abs/2402.04792; Noukhovitch et al. 2024, https://arxiv.org/abs/2410.18252."""

    samples: int = setting(4, least=2)

    data: ClassVar[Data] = "prompts"

    def rows(self, group: Group) -> list[Row]:
        ranked = sorted(scored(pickable(group.responses)), key=lambda pair: pair[0])
        if len(ranked) < 2 or ranked[0][0] == ranked[-1][0]:
            return []
        return [row_of(group, ranked[-1][1]), row_of(group, ranked[0][1])]
