"""Several rewards as one: their weighted sum, with every part kept for metrics and samples."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from plaudit.rewards.base import Reward
from plaudit.support.visible import visible
from plaudit.types import NOT_APPLICABLE, Completion, Prompt, Score


class WeightedReward:
    """value = sum of weight * value over the rewards; `parts` has each reward's unweighted value under its name.

    - A reward's own parts are named "name/part". A reward of weight 0 is only shown.
    - If a reward fails, or its value is not finite, the sum fails too, with a reason that names the reward.
    - Rewards that do not apply to an answer are left out of its sum. With `renormalise` the sum is then multiplied by
      (sum of all |weight|) / (sum of |weight| of those that apply). If none with a weight applies, nor does the sum; a
      sum of no rewards applies to no answer.
    - `compares`: a score depends on the other answers to the prompt.
    """

    def __init__(
        self, rewards: Sequence[tuple[Reward, float, str]], *, renormalise: bool = False, compares: bool = False
    ):
        twice = [name for name, count in Counter(name for _, _, name in rewards).items() if count > 1]
        if twice:
            raise ValueError(f"Two rewards are called {twice[0]!r}. Give each a `name` of its own.")
        self.rewards, self.renormalise, self.compares = tuple(rewards), renormalise, compares
        self.whole = sum(abs(weight) for _, weight, _ in rewards)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if not self.rewards:
            return [Score(value=None, reason=NOT_APPLICABLE)] * len(completions)
        columns = await asyncio.gather(*(reward.score(prompt, completions) for reward, _, _ in self.rewards))
        return [self._sum(scores) for scores in zip(*columns, strict=True)]

    def _sum(self, scores: Sequence[Score]) -> Score:
        parts: dict[str, float] = {}
        reasons: list[str] = []
        passing: list[bool] = []
        total = applied = 0.0
        process = list[tuple[int, float]]()
        for (_, weight, name), score in zip(self.rewards, scores, strict=True):
            parts.update({f"{name}/{part}": value for part, value in score.parts.items()})
            if score.value is not None and math.isfinite(score.value):
                parts[name] = score.value
                total += weight * score.value
                process += [(place, weight * reward) for place, reward in score.process if weight]
                applied += abs(weight)
            elif weight and score.applicable:
                reasons.append(f"{name}: {score.reason if score.failed else f'its value is {score.value}'}")
                passing.append(score.transient)
        if not reasons and not applied and self.whole:
            return Score(value=None, parts=parts, reason=NOT_APPLICABLE)
        if self.renormalise and applied:
            total *= self.whole / applied
            process = [(place, reward * self.whole / applied) for place, reward in process]
        if not reasons and not math.isfinite(total):
            reasons.append(f"the weighted sum is {total}")
        if reasons:
            reason = visible("; ".join(reasons), line=True)
            return Score(value=None, parts=parts, reason=reason, transient=bool(passing) and all(passing))
        return Score(value=total, parts=parts, process=tuple(process))
