"""Group-relative policy optimisation, with Dr.GRPO, DAPO and GSPO as settings.

Group of `samples` answers -> rows -> Batch -> credit: reward against the group's mean -> advantages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plaudit.algorithms.base import Memory, scored
from plaudit.algorithms.figures import credit_figures
from plaudit.algorithms.policy_gradient import PolicyGradient, reference_kl, spread
from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.advantages import by_turn, group_centred
from plaudit.maths.ragged import row_sum
from plaudit.support.fields import setting
from plaudit.types import Group, Role, Row, Stats


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """`samples` completions of each prompt are sampled. An answer is good if it beats its group's mean, in units of the
    group's deviation. The clipped policy loss is minimised, with a KL term if `kl_in_loss` is set. Shao et al. 2024.

    Dr.GRPO: scale_rewards=false aggregation=<max tokens>. DAPO: clip=[0.2,0.28] dynamic_sampling=true
    dynamic_sampling_part=<the accuracy's name> and the `overlong` reward. GSPO: ratio=geometric aggregation=sequence
    clip=[3e-4,4e-4].
    """

    samples: int = setting(8, least=2)
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of the group's rewards; Dr.GRPO does not."""
    turn_credit: float | None = setting(None, least=0)
    """Credit turns by their own process rewards against the group's, plus this times the end's advantage; null: not."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of further prompts (DAPO)."""
    dynamic_sampling_part: str | None = None
    """The part of the reward that must differ, by its name in metrics without "reward/". DAPO: accuracy, which a length
    penalty must not hide. null, or a part that does not apply to a prompt: the whole reward."""

    has_baseline: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.dynamic_sampling_part is not None and not self.dynamic_sampling:
            yield f"dynamic_sampling_part={self.dynamic_sampling_part} needs dynamic_sampling=true: set that, or null"

    @property
    def asks(self) -> frozenset[Role]:  # type: ignore[override]
        return frozenset({Role.REFERENCE}) if self.kl_in_loss else frozenset()

    def rows(self, group: Group) -> list[Row]:
        return [] if self.dynamic_sampling and len(self._compared(group)) < 2 else super().rows(group)

    def _compared(self, group: Group) -> set[float]:
        """Return the values that must differ in the group. Raises ValueError if its reward lacks the named part."""
        rewards, part = scored(group.responses), self.dynamic_sampling_part or ""
        values = {response.score.parts[part] for _, response in rewards if part in response.score.parts}
        names = {name for _, response in rewards for name in response.score.parts}
        if not values and any(part.startswith(f"{name}/") for name in names):
            raise ValueError(
                f"dynamic_sampling_part={part} is not a part of the reward of prompt {group.prompt.id}. Name one of "
                f"{', '.join(sorted(names))}, or null for the whole reward"
            )
        return values or {reward for reward, _ in rewards}

    def credit(self, batch: Batch, memory: Memory) -> tuple[Batch, Stats]:
        answers = Answers(batch)
        reward, group = answers.of(batch.reward), answers.of(batch.group)
        if self.turn_credit is None or batch.process is None:
            advantages = spread(group_centred(reward, group, scale=self.scale_rewards), batch)
        else:
            reward = reward - row_sum(batch.process, answers.token, answers.count)
            advantages = by_turn(batch.process, batch.trainable, answers.token, group, scale=self.scale_rewards)
            advantages += self.turn_credit * spread(group_centred(reward, group, scale=self.scale_rewards), batch)
        batch = batch.with_columns(advantages=advantages)
        return batch, credit_figures(batch, kl=reference_kl(batch)[1] if self.kl_in_loss else None)
