"""The interface of rewards: a prompt and its completions in, one Score each out.

    rules.py (Python functions), judge.py (a learned reward model), weighted.py (a sum of rewards)

Scale, shift, clip and the penalty for unfinished answers come after it, in `shaping.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from plaudit.types import Completion, Prompt, Score

Unscored = TypeVar("Unscored")


class Reward(Protocol):
    """The caller passes completions of one prompt. The implementer returns one Score per completion, in order.

    What cannot be scored gets a Score without a value, with the reason (NOT_APPLICABLE if the reward is not meant for
    such an answer), never 0. One bad completion neither raises nor affects the others. Raise only if no completion can
    be scored, for example because of wrong settings.
    """

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]: ...


class TimedReward:
    """A reward whose questions are timed."""

    def __init__(self, reward: Reward, doing: Callable[[], AbstractContextManager[None]]):
        self.reward, self.doing = reward, doing

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        with self.doing():
            return await self.reward.score(prompt, completions)


async def completed(
    found: Sequence[Unscored | Score], ask: Callable[[list[Unscored]], Awaitable[Sequence[Score]]]
) -> list[Score]:
    """Return the scores, in order: those given, and the answers of `ask` in place of everything else."""
    scores = iter(await ask([one for one in found if not isinstance(one, Score)]))
    return [one if isinstance(one, Score) else next(scores) for one in found]
