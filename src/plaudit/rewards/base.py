"""The interface of rewards: from a prompt and its completions to one Score per completion.

    rules.py (Python functions), judge.py (a learned reward model), weighted.py (a sum of rewards)

`shaping.py` then applies scale, shift, clip and the penalty for unfinished answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from plaudit.types import Completion, Prompt, Score

Unscored = TypeVar("Unscored")
Timing = Callable[[], AbstractContextManager[None]]


class Reward(Protocol):
    """The caller passes completions of one prompt. The implementer returns one Score per completion, in order.

    A completion that cannot be scored gets a Score without a value, with the reason, and never 0. The reason is
    NOT_APPLICABLE if the reward does not apply to the answer. One bad completion neither raises nor affects the others.
    Raise only if no completion can be scored, for example because of wrong settings.
    """

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]: ...


class Turns:
    """`async with turns():` lets at most `most` tasks in at once. Another event loop gets a semaphore of its own."""

    def __init__(self, most: int):
        self.most = most
        self._of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._of is None or self._of[0] is not loop:
            self._of = (loop, asyncio.Semaphore(self.most))
        return self._of[1]


class TimedReward:
    """A reward that records the time of each call. A sum's parts are timed one by one, since the sum also waits."""

    def __init__(self, reward: Reward, doing: Timing):
        self.reward, self.doing = reward, doing

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        with self.doing():
            return await self.reward.score(prompt, completions)


async def completed(
    found: Sequence[Unscored | Score], ask: Callable[[list[Unscored]], Awaitable[Sequence[Score]]]
) -> list[Score]:
    """Return one score per entry, in order: entries that are scores already, and `ask`'s score for every other
    entry."""
    scores = iter(await ask([one for one in found if not isinstance(one, Score)]))
    return [one if isinstance(one, Score) else next(scores) for one in found]
