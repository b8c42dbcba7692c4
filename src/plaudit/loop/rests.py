"""Measure the time in which no prompt is being answered. With lag, rollout workers are idle then."""

from __future__ import annotations

import time

from plaudit.loop.progress import Moment
from plaudit.rollout.rollouter import Groups
from plaudit.types import Group, Prompt, Stats


class Rests:
    """Wrap a source of groups to measure when no rollout runs. As a hook, report these seconds since the previous
    step as `time/rollout_idle`."""

    def __init__(self, groups: Groups):
        self.groups = groups
        self._busy = 0
        self._rested = 0.0
        self._since: float | None = None
        """When the current idle time began; None before the first rollout and during rollouts."""

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        self._count()
        self._busy, self._since = self._busy + 1, None
        try:
            return await self.groups.rollout(index, prompt)
        finally:
            self._busy -= 1
            if not self._busy:
                self._since = time.monotonic()

    async def __call__(self, moment: Moment) -> Stats:
        self._count()
        rested, self._rested = self._rested, 0.0
        return {"time/rollout_idle": rested}

    def _count(self) -> None:
        """If no rollout runs, add the seconds since the last count, or since the last rollout ended."""
        if self._since is not None:
            now = time.monotonic()
            self._rested, self._since = self._rested + now - self._since, now
