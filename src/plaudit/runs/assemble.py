"""Build a run from its settings: what is connected to what.

settings -> intake (tokenizer, data) -> executor (training ranks, engine), rewards -> source of batches, hooks
         -> train -> Run

Left out: how parts are made of their settings (`rewards/listed.py`, `loop/rollouts.py`, `hooks.py`), and replays
(`replay.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plaudit.algorithms.base import Algorithm, Objective
from plaudit.environments.agents import player_of
from plaudit.executors.base import Executor, Plan
from plaudit.executors.opening import Executors
from plaudit.loop.best import Best
from plaudit.loop.checkpoint import Store
from plaudit.loop.finite import check_start
from plaudit.loop.hooks import RunState
from plaudit.loop.offline import OfflineSource, with_reference
from plaudit.loop.progress import BatchSource, Hook, Progress
from plaudit.loop.redraw import LastingSource
from plaudit.loop.restart import Restart
from plaudit.loop.rollouts import Rollouts
from plaudit.loop.stopping import unless
from plaudit.loop.train import GOES_BACK, train
from plaudit.monitor.console import Reporter
from plaudit.monitor.events import Events
from plaudit.rewards.base import Reward
from plaudit.rewards.listed import ListedRewards
from plaudit.rollout.rollouter import Groups
from plaudit.runs import records
from plaudit.runs.hooks import RunHooks
from plaudit.runs.intake import Intake, few_steps
from plaudit.runtime.worker import Doing
from plaudit.settings.tree import Settings
from plaudit.support.errors import Stopped
from plaudit.types import Role


class Job:
    """Builds the parts of one run from its settings, and trains it."""

    def __init__(self, settings: Settings, folder: Path, store: Store, resume: str | None, reporter: Reporter):
        self.settings, self.folder, self.store, self.reporter = settings, folder, store, reporter
        self.events = Events(folder / records.EVENTS)
        self.rewards = ListedRewards(settings.rewards, renormalise=settings.shaping.renormalise)
        self.objective: Objective = settings.objective
        self.intake = Intake(settings, self.objective, reporter.say)
        self.data, self.tokenizer = self.intake.data, self.intake.tokenizer
        self.rewards.check(self.data.items)
        self.total_steps = self.last_step = self.intake.steps
        """Number of steps of the schedule, and the step after which the run ends: earlier if a replay's record ends."""
        self.held_out: Sequence[Any] = self.data.validation[: settings.evaluate.limit]
        """Validation items on which the run is evaluated."""
        longest, given = self.intake.longest.tokens, (settings.learn, settings.runtime)
        self.restart = Restart(store, resume, *given, longest=longest, steps=self.total_steps, say=reporter.say)
        self.hooks = RunHooks(settings, store, self.events, reporter, self.tokenizer, self.rewards.names)
        for doubt in few_steps(settings, self.total_steps):
            reporter.say(f"warning: {doubt}")
        if resume is not None and records.other_rows(folder, self.data.report.json()):
            reporter.say("warning: the data has changed since this run read it: from here, rows have another order")

    @classmethod
    def trial(cls, settings: Settings, folder: Path) -> Job:
        """Return a job for `plaudit profile`, whose parts are timed: it saves and prints nothing."""
        return cls(settings, folder, Store(folder / records.CHECKPOINTS), None, Reporter(quiet=True))

    # --- executor, rewards, source

    def plan(self) -> Plan:
        """Return what training ranks need besides the settings, such as the checkpoint and the sizes of passes."""
        folder, begin, intake = self.store.folder.resolve(), self.restart, self.intake
        beside = begin.passes, intake.as_chat, begin.mirrored
        return Plan(folder, begin.resume, self.total_steps, intake.longest, *beside)

    def reward(self, executor: Executor, doing: Doing) -> Reward:
        """Return the run's reward: the weighted sum of the rewards in its settings, each a part under its name."""
        return self.rewards.reward(executor.judge, executor.function, self.tokenizer, doing)

    def rollouts(self, executor: Executor, method: Algorithm, stop: list[int]) -> Rollouts:
        """Return rollouts on the executor's sampler, scored by the run's reward."""
        s, doing = self.settings, self.events.doing
        engine = executor.sampler(doing)
        parts = engine, self.reward(executor, doing), s.shaping, method.plan(s.rollout.draw())
        world, workers = self.intake.world, executor.environment()
        play = None if world is None else player_of(engine, self.intake.chats, world, workers).play
        return Rollouts(*parts, settings=s.rollout, seed=s.seed, stop=stop, say=self.reporter.say, play=play)

    def source(self, executor: Executor, stop: list[int]) -> tuple[BatchSource, Rollouts | None]:
        """Return the source of batches for the loop, and its rollouts if the run samples (else None)."""
        if not isinstance(self.objective, Algorithm):
            cursor, size = self.data.cursor(self.settings.seed), self.settings.train.batch_size
            return OfflineSource(self.data.items, cursor, batch_size=size, unit=self.objective.unit), None
        rollouts = self.rollouts(executor, self.objective, stop)
        return self.online(executor, rollouts.rests, repair=rollouts.outage.repaired), rollouts

    def online(self, executor: Executor, groups: Groups, **more: Any) -> BatchSource:
        """Return an online method's source of batches, which takes its groups from `groups`."""
        cursor, rollout = self.data.cursor(self.settings.seed), self.settings.rollout
        more |= {"prompts_per_step": rollout.prompts_per_step, "max_lag": rollout.max_lag}
        given = self.data.items, cursor, groups, self.objective
        return LastingSource(*given, lost=executor.pinned, say=self.reporter.say, **more)

    @property
    def refers_again(self) -> bool:
        """True if an offline run should compute reference log-probs once, before training: the reference is frozen, and
        rows are read more than once and not streamed."""
        settings = self.settings
        frozen = Role.REFERENCE in self.objective.asks and not settings.reference.ema and not settings.data.stream
        return frozen and self.total_steps * settings.train.batch_size > self.data.cursor(settings.seed).length

    # --- the run

    async def train(self, executors: Executors, stop: list[int], further: Iterable[Hook] = ()) -> Progress:
        """Open an executor and train, from the checkpoint to resume if there is one. After an error of GOES_BACK, train
        again from the checkpoint that `restart` chooses, unless it raises the error."""
        try:
            while True:
                try:
                    return await self._sitting(executors, stop, further)
                except GOES_BACK as error:
                    self.restart.after(error, executors.failures)
                torch.manual_seed(self.settings.seed)
        finally:
            executors.dismiss()

    async def _sitting(self, executors: Executors, stop: list[int], further: Iterable[Hook]) -> Progress:
        """Train with one executor until the end or an error. Keep no reference to its models: another may need room."""
        executor = await unless(stop, executors.open(self.plan()))
        return await executor.watched(self._train(executor, stop, further))

    async def _train(self, executor: Executor, stop: list[int], further: Iterable[Hook]) -> Progress:
        settings, resume = self.settings, self.restart.resume
        models = executor.models()
        source, rollouts = self.source(executor, stop)
        best = Best(settings.evaluate.best, settings.evaluate.patience)
        state = RunState(source, {}, best)

        def ended(progress: Progress) -> bool:
            return progress.step >= self.last_step or best.exhausted

        progress = await self.restart.begin(executor.back, models, state, ended)
        if resume is not None:
            records.save_start(self.folder, settings, self.data.report.json())  # a refused start changes nothing
        models = replace(models, rate=progress.rate)
        await check_start(models, str(resume or settings.model.path))
        await executor.publish(progress.step)
        if self.refers_again and isinstance(source, OfflineSource):
            source.items = await with_reference(source.items, models, unit=self.objective.unit)
        given: dict[str, Any] = {"rollouts": rollouts, "held_out": self.held_out, "further": further}
        with self.reporter.track(settings.method, self.total_steps, done=progress.step) as bar:
            hooking = self.hooks.opened(executor, models, state, progress, bar, steps=self.last_step, **given)
            try:
                async with hooking as hooks:
                    progress = await train(
                        source,
                        models,
                        executor.publish,
                        hooks,
                        training=executor.training,
                        until=ended,
                        stop=lambda: bool(stop),
                        progress=progress,
                        memory=state.memory,
                        seed=settings.seed,
                    )
            except Stopped as stopped:  # the signal came while the run waited for rewards
                raise Stopped(stop[0], bar.done) if stop else stopped from None
        if stop and not ended(progress):
            raise Stopped(stop[0], progress.step)
        for line in best.summary(early=progress.step < self.last_step):
            self.reporter.say(line)
        return progress
