"""Start judges, reward functions and environments in their own processes.

    open -> functions and environments begin to start -> ready: all are loaded
    judges -> begin to start when the run asks for them, while the first answers are sampled

Left out: requests to these processes, and the loss of a process (`rewards/workers.py`, `environments/workers.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.environments.agents import world_of
from plaudit.environments.workers import EnvironmentProcess, EnvironmentWorkers
from plaudit.executors.processes import judge_worker
from plaudit.executors.together import Located
from plaudit.rewards.base import Reward
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.workers import FunctionProcess, FunctionWorkers, JudgeWorkers, Scores
from plaudit.runtime.coroutines import together
from plaudit.runtime.resources import Resources, reserved
from plaudit.runtime.worker import Worker, WorkerLost
from plaudit.settings.tree import Settings, to_plain
from plaudit.types import Completion, Prompt, Score

if TYPE_CHECKING:
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker import RayWorker

HELD, SHARE = 10.0, 0.2
"""A function in the driver's process is reported once it has blocked it this many seconds, and this share of time."""
Kind = TypeVar("Kind")
Reserve = Callable[[str, tuple[str, int], Sequence[Resources]], Awaitable[dict[str, Any]]]
"""Reserves resources for a worker's processes, or reuses those of its predecessor; returns arguments of `spawn`."""


class Holding:
    """A reward function in the driver's process; it reports once if it blocks the driver for long."""

    def __init__(self, function: FunctionReward, key: str, say: Callable[[str], None]):
        self.function, self.key, self._say = function, key, say
        self._begun: float | None = None
        self._told = False

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self._begun = begun = self._begun or time.monotonic()
        scores = await self.function.score(prompt, completions)
        held, all_time = self.function.held, time.monotonic() - begun
        if not self._told and held > max(HELD, SHARE * all_time):
            self._told = True
            self._say(
                f"the reward {self.function.name} has kept the run's process busy for {held:.0f} of {all_time:.0f} "
                f"seconds, in which nothing else went on there: {self.key}.workers=1 gives it a process of its own"
            )
        return scores


def judges_placed(settings: Settings, nodes: Sequence[Resources], *, here: bool) -> Settings:
    """Return the settings with a process for each judge that would be in the driver, if only other nodes have GPUs.
    `here`: the driver has one too."""
    if here or settings.device == "cpu" or not any(node.get("GPU") for node in nodes):
        return settings
    rewards = [replace(one, workers=1) if one.kind == "judge" and not one.workers else one for one in settings.rewards]
    return replace(settings, rewards=rewards)


def stays(settings: Settings) -> bool:
    """True if long answers may stay on their nodes, since nothing in the driver reads all of their numbers (a plug-in's
    method may). False with servers: training workers come and go there, and none keeps answers for the others."""
    if settings.runtime.served or settings.rollout.record:
        return False
    ours = type(settings.objective).__module__.startswith("plaudit.")
    return ours and not any(_reads(one) for one in settings.rewards)


def _reads(reward: RewardSettings) -> bool:
    """True if the driver reads every answer's tokens for a reward."""
    if reward.kind in ("judge", "http"):
        return reward.kind == "http" or not reward.workers
    return function_reward(reward).reads_tokens


class Scoring:
    """The processes of a run's rewards and of its environment. They stay when ranks are formed again."""

    def __init__(
        self,
        settings: Settings,
        runtime: RayRuntime,
        share: Resources,
        room: Reserve,
        *,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None],
    ):
        """`share`: an equal share of the CPUs."""
        self.settings, self.runtime, self.share, self._room = settings, runtime, share, room
        self.bundles = [reserved(one, share) for one in settings.reserving]
        # Placing a worker may take start_timeout, and so may loading.
        self._how: dict[str, Any] = {"patience": 2 * settings.runtime.start_timeout, "failures": failures, "say": say}
        self._judges: dict[int, JudgeWorkers] = {}
        self._functions: dict[int, FunctionWorkers] = {}
        self._environment: EnvironmentWorkers | None = None

    def open(self) -> None:
        """Begin to start functions and environments, within a running event loop."""
        for which, reward in enumerate(self.settings.rewards if self.settings.samples else ()):
            if reward.workers and reward.kind != "judge":
                make, one = FunctionProcess.maker(reward, self.settings.plugins), function_reward(reward)
                start = partial(self._function, which, reward, make)
                how = {"waits": one.waits, "tokens": one.reads_tokens, "deadline": reward.deadline, **self._how}
                self._functions[which] = FunctionWorkers(start, reward.workers, **how)
                self._functions[which].open()
        if (environment := self.settings.environment).workers and self.settings.samples:
            playing = EnvironmentProcess.maker(world_of, environment, self.settings.plugins)
            self._environment = EnvironmentWorkers(partial(self._playing, playing), environment.workers, **self._how)
            self._environment.open()

    async def ready(self) -> None:
        """Wait until every function and environment is loaded. Raises what prevents it."""
        await together(one.ready() for one in self._others)

    @property
    def _others(self) -> list[FunctionWorkers | EnvironmentWorkers]:
        return [*self._functions.values(), *([self._environment] if self._environment else ())]

    def environment(self) -> EnvironmentWorkers | None:
        """Return the processes of the environment; None if it has none."""
        return self._environment

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        """Return the function's processes as a reward. Without any, return `here`, wrapped to report long calls."""
        if (which := self._which(reward)) in self._functions:
            return self._functions[which]
        return Holding(here, f"rewards.{which}", self._how["say"]) if isinstance(here, FunctionReward) else here

    def judges(self, reward: RewardSettings) -> JudgeWorkers:
        """Return a reward's judge processes; later calls return the same. The first call begins to start them: after
        ranks and rollout workers, which get resources first, and while the first answers are sampled."""
        if (which := self._which(reward)) not in self._judges:
            key, bundles = f"rewards.{which}", [reserved(reward.resources, self.share)] * reward.tensor
            said = f"{key} judges", f"{key}.tensor", reward.workers, bundles, f"{key}.resources"
            start = partial(self._judge, which, reward, Located(*said, self._how["say"]))
            self._judges[which] = JudgeWorkers(start, reward.workers, **self._how)
            self._judges[which].open()
        return self._judges[which]

    def _which(self, reward: RewardSettings) -> int:
        return next((number for number, one in enumerate(self.settings.rewards) if one is reward), -1)

    async def _judge(self, which: int, reward: RewardSettings, located: Located, number: int) -> Worker[Scores]:
        name = f"judge {number} ({Path(reward.path).name})"
        there = await self._room(name, (f"judge {which}", number), located.bundles)
        recipe, patience = to_plain(self.settings) | {"resume": None}, self.settings.runtime.collective_timeout
        placed = partial(located.started, number)
        return await judge_worker(self.runtime, recipe, reward, patience=patience, placed=placed, **there)

    async def _function(
        self, which: int, reward: RewardSettings, make: Callable[[], FunctionProcess], number: int
    ) -> RayWorker[FunctionProcess]:
        name = f"function {number} ({reward.name or reward.function or reward.kind})"
        return await self._placed(name, (f"function {which}", number), reward.resources, make)

    async def _playing(self, make: Callable[[], EnvironmentProcess], number: int) -> RayWorker[EnvironmentProcess]:
        return await self._placed(
            f"environment {number}", ("environment", number), self.settings.environment.resources, make
        )

    async def _placed(
        self, name: str, key: tuple[str, int], resources: Resources, make: Callable[[], Kind]
    ) -> RayWorker[Kind]:
        """Start a process with its reserved resources, or on the driver's node if it reserves nothing."""
        if not resources:
            return await self.runtime.beside(make, name=name)
        there = await self._room(name, key, [reserved(resources, self.share)])
        return await self.runtime.spawn(make, place=0, **there)

    def close(self) -> None:
        for judges in self._judges.values():
            judges.close()
        for one in self._others:
            one.close()
