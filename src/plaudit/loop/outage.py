"""Wait for rewards if too many rewards of a step failed.

    groups of a step -> more failed rewards than allowed -> ask again at once, after 1, 2, 4, ... 60 s -> groups

The answers stay as they were drawn, so a run whose reward server was unavailable ends like an undisturbed one. No score
is invented: an answer that still has none is masked, or the run ends. Left out: the few failures that a step may have,
and a client's own retries (`rewards/remote.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from plaudit.loop.stopping import unless
from plaudit.monitor.console import clock as as_time
from plaudit.runtime.coroutines import together
from plaudit.support.errors import Ended
from plaudit.types import Group, Response

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second try, and at most before a later one; each wait is twice the one before."""
TRIES = 3
"""Tries for a reward whose failure looks permanent."""


class RewardFailureError(Ended):
    """Too many rewards failed, so training on the others would be biased."""

    status = 3


class Outage:
    """Wait for failed rewards. `say` reports each try; `listeners` receive the same text, and "" once rewards work
    again."""

    def __init__(
        self,
        again: Callable[[Group, bool], Coroutine[Any, Any, Group]],
        *,
        most: float,
        patience: float,
        stop: list[int] | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """`again(group, lasting)` asks again for a group's rewards that failed transiently, and with `lasting` also for
        those that failed permanently. `most`: share of a step's rewards that may fail. `patience`: seconds to wait for
        transient failures. When `stop` holds a signal, the wait ends with Stopped."""
        self._again, self.most, self.patience, self._stop = again, most, patience, [] if stop is None else stop
        self._say, self._clock, self._sleep = say, clock, sleep
        self.listeners: list[Callable[[str], None]] = []

    async def repaired(self, groups: Sequence[Group]) -> list[Group]:
        """As `waited`, and raise RewardFailureError if more than the allowed share of rewards still failed."""
        groups = await self.waited(groups)
        if self._share(groups) > self.most:
            raise RewardFailureError(f"{self._failure(groups)}.")
        return groups

    async def waited(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups after asking again for failed rewards, if more than the allowed share failed. Too many may
        remain failed if all look permanent. Raises RewardFailureError once patience is used up."""
        if self._share(groups) <= self.most:
            return list(groups)
        return await unless(self._stop, self._asked_again(list(groups)))

    async def _asked_again(self, groups: list[Group]) -> list[Group]:
        """Takes: groups with failed rewards. Waits for: few enough failures, or the end of patience. Woken by: the next
        try. Gives: the groups."""
        began, tries = self._clock(), 0
        while True:
            groups = await together(self._again(group, tries < TRIES) for group in groups)
            tries += 1
            passed = self._clock() - began
            if self._share(groups) <= self.most:
                if tries > 1:
                    self._tell(f"rewards work again, after {as_time(passed)}", "")
                return groups
            if tries >= TRIES and not any(response.score.transient for response in failed(groups)):
                return groups
            if passed >= self.patience:
                waited = f"for {self.patience:g} s (rollout.reward_patience)."
                raise RewardFailureError(f"{self._failure(groups)}, {waited}")
            wait = min(FIRST_WAIT * 2 ** (tries - 1), LONGEST_WAIT, self.patience - passed)
            words = (
                f"rewards have failed for {as_time(passed)} ({_usual_reason(groups)}): next try in {wait:.0f} s, "
                f"patience {as_time(self.patience)}"
            )
            self._tell(words, words)
            await self._sleep(wait)

    def _tell(self, words: str, standing: str) -> None:
        self._say(words)
        for listener in self.listeners:
            listener(standing)

    def _share(self, groups: Sequence[Group]) -> float:
        return len(failed(groups)) / max(1, sum(len(group.responses) for group in groups))

    def _failure(self, groups: Sequence[Group]) -> str:
        reasons = {str(response.score.reason) for response in failed(groups)}
        return (
            f"{self._share(groups):.0%} of the rewards of this step failed, {self.most:.0%} are allowed "
            f"(rollout.max_failed). Reasons: {sorted(reasons)[:3]}"
        )


def failed(groups: Sequence[Group]) -> list[Response]:
    """Return the responses whose reward failed."""
    return [response for group in groups for response in group.responses if response.score.failed]


def _usual_reason(groups: Sequence[Group]) -> str:
    """Return the most frequent reason of failure, of transient failures if there are any; at most 200 characters."""
    found = failed(groups)
    found = [response for response in found if response.score.transient] or found
    ((reason, _),) = Counter(str(response.score.reason) for response in found).most_common(1)
    return reason[:200]
