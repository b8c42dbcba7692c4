"""Several rewards as one: their weighted sum, with every part kept for metrics and samples."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from plaudit.rewards.base import Reward
from plaudit.types import Completion, Prompt, Score


class WeightedReward:
    """value = sum of weight * value over the rewards; parts hold each one's unweighted value under its name.

    A reward's own parts come as "name/part". If one reward has no value, or none that is finite, there is no sum, and
    the reason names it; one of weight 0 is shown and counts for nothing.
    """

    def __init__(self, rewards: Sequence[tuple[Reward, float, str]]) -> None:
        if not rewards:
            raise ValueError("A weighted reward needs at least one reward.")
        twice = [name for name, count in Counter(name for _, _, name in rewards).items() if count > 1]
        if twice:
            raise ValueError(f"Two rewards are called {twice[0]!r}. Give each a `name` of its own.")
        self.rewards = tuple(rewards)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        columns = await asyncio.gather(*(reward.score(prompt, completions) for reward, _, _ in self.rewards))
        return [self._sum(scores) for scores in zip(*columns, strict=True)]

    def _sum(self, scores: Sequence[Score]) -> Score:
        parts: dict[str, float] = {}
        reasons: list[str] = []
        total = 0.0
        for (_, weight, name), score in zip(self.rewards, scores, strict=True):
            parts.update({f"{name}/{part}": value for part, value in score.parts.items()})
            failure = score.reason if score.value is None else f"its value is {score.value}"
            if score.value is not None and math.isfinite(score.value):
                parts[name] = score.value
                total += weight * score.value
            elif weight:
                reasons.append(f"{name}: {failure}")
        if not reasons and not math.isfinite(total):
            reasons.append(f"the weighted sum is {total}")
        if reasons:
            return Score(value=None, parts=parts, reason="; ".join(reasons))
        return Score(value=total, parts=parts)
