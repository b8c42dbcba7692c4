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
    """A semaphore of `most` tasks for `async with turns():`, made anew for each event loop that uses it."""

    def __init__(self, most: int):
        self.most = most
        self._of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._of is None or self._of[0] is not loop:
            self._of = (loop, asyncio.Semaphore(self.most))
        return self._of[1]


class TimedReward:
    """A reward whose calls are timed by `doing`. Each part of a weighted sum is timed by itself."""

    def __init__(self, reward: Reward, doing: Timing):
        self.reward, self.doing = reward, doing

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        with self.doing():
            return await self.reward.score(prompt, completions)


async def completed(
    found: Sequence[Unscored | Score], ask: Callable[[list[Unscored]], Awaitable[Sequence[Score]]]
) -> list[Score]:
    """Return one score per entry of `found`, in order: the entry itself if it is a score already, else the score that
    `ask` returns for it."""
    scores = iter(await ask([one for one in found if not isinstance(one, Score)]))
    return [one if isinstance(one, Score) else next(scores) for one in found]
