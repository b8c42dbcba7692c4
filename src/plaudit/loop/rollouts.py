"""A run's rollouts, with what recovers them.

sampler, reward -> LastingRollouter, which draws lost answers again -> Rests, which measures idle time -> groups
groups of a step -> Outage, which waits for failed rewards -> groups
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from plaudit.loop.hooks import validation_rewards
from plaudit.loop.outage import Outage
from plaudit.loop.redraw import LastingRollouter
from plaudit.loop.rests import Rests
from plaudit.rollout.rollouter import Play
from plaudit.rollout.settings import RolloutSettings
from plaudit.types import Group, Prompt, Stats


class Rollouts:
    """Rollouts of a run: `rests` samples a prompt's group, and is a hook; `outage` waits for failed rewards."""

    def __init__(
        self,
        *given: Any,
        settings: RolloutSettings,
        seed: int,
        stop: list[int],
        say: Callable[[str], None],
        play: Play | None = None,
    ):
        """`given` (by position), `play`: of `Rollouter`. When `stop` holds a signal, waiting raises Stopped."""
        self.settings, self.rollouter = settings, LastingRollouter(*given, seed=seed, play=play)
        self.rests = Rests(self.rollouter)
        most, patience = settings.max_failed, settings.reward_patience
        self.outage = Outage(self.rollouter.again, most=most, patience=patience, stop=stop, say=say)

    def validation(
        self, prompts: Sequence[Prompt], record: Callable[[Sequence[Group]], None]
    ) -> Callable[[], Awaitable[Stats]]:
        """Return a function that samples and scores answers to `prompts`, and returns figures; `record` gets groups."""
        own, plan = self.rollouter, (self.settings.draw(),)
        held_out = LastingRollouter(own.engine, own.reward, own.shaping, plan, seed=own.seed + 1, play=own.play)
        return partial(validation_rewards, held_out, prompts, self.outage.waited, record)
