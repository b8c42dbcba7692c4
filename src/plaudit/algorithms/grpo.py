"""Group-relative policy optimisation, with Dr.GRPO, DAPO and GSPO as settings."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.algorithms.base import Memory, check_range, scored
from plaudit.algorithms.policy_gradient import PolicyGradient, credit_figures, reference_kl, spread
from plaudit.batch import Batch
from plaudit.maths.advantages import group_centred
from plaudit.types import Group, Role, Row, Stats


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """`samples` completions of each prompt are sampled. Good is what beats its group's mean, in units of the group's
    deviation. Minimised is the clipped policy loss, with a KL term if `kl_in_loss` is set. Shao et al. 2024.

    Dr.GRPO: scale_rewards=false aggregation=constant constant=<max tokens>. DAPO: clip_high=0.28 dynamic_sampling=true
    and the `overlong` reward. GSPO: ratio=geometric aggregation=sequence clip_low=3e-4 clip_high=4e-4.
    """

    samples: int = 8
    scale_rewards: bool = True
    """Divide by the group's deviation."""
    dynamic_sampling: bool = False
    """Replace groups of equal rewards by further prompts (DAPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("samples", self.samples, 2)

    @property
    def asks(self) -> frozenset[Role]:  # type: ignore[override]
        return frozenset({Role.REFERENCE}) if self.kl_in_loss else frozenset()

    def rows(self, group: Group) -> list[Row]:
        rewards = {reward for reward, _ in scored(group.responses)}
        if self.dynamic_sampling and len(rewards) < 2:
            return []
        return super().rows(group)

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        assert batch.reward is not None
        advantage = group_centred(batch.reward, batch.group, scale=self.scale_rewards)
        batch = batch.with_columns(advantages=spread(advantage, batch))
        return batch, credit_figures(batch, kl=reference_kl(batch)[1] if self.kl_in_loss else None)
