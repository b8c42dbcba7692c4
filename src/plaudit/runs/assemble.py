"""Build a run from its settings. Only this file names the concrete classes and connects them.

settings -> intake (tokenizer, data) -> executor (training ranks, engine), rewards -> source, hooks -> train -> Run
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plaudit.algorithms.base import Algorithm, Objective
from plaudit.executors.base import Executor, Plan
from plaudit.executors.opening import Executors
from plaudit.loop.best import Best
from plaudit.loop.checkpoint import Store
from plaudit.loop.finite import check_start
from plaudit.loop.hooks import (
    Due,
    During,
    Evaluate,
    RecordEvents,
    RecordMetrics,
    SaveCheckpoint,
    Track,
    restore,
    restored,
    validation_loss,
    validation_rewards,
)
from plaudit.loop.models import Models
from plaudit.loop.offline import OfflineSource, with_reference
from plaudit.loop.outage import Outage
from plaudit.loop.progress import BatchSource, Hook, Moment, Progress
from plaudit.loop.recorded import Compare, RecordedRun, RecordGroups
from plaudit.loop.redraw import LastingRollouter, LastingSource
from plaudit.loop.restart import Restart
from plaudit.loop.rests import Rests
from plaudit.loop.samples import RecordSamples, recording
from plaudit.loop.speak import Speak
from plaudit.loop.stopping import unless
from plaudit.loop.train import GOES_BACK, train
from plaudit.monitor.console import ProgressBar, Reporter
from plaudit.monitor.events import Events
from plaudit.monitor.health import Health
from plaudit.monitor.sinks import JsonLines, Tracker, read_jsonl
from plaudit.rewards.base import Reward, TimedReward
from plaudit.rewards.batched import LOOKED_AT
from plaudit.rewards.protocol import vocabulary_digest
from plaudit.rewards.remote import HttpReward
from plaudit.rewards.rules import FunctionReward, function_reward
from plaudit.rewards.weighted import WeightedReward
from plaudit.rollout.rollouter import Rollouter
from plaudit.runs import records
from plaudit.runs.intake import Intake, few_steps
from plaudit.runs.planned import planned
from plaudit.runs.records import Run, let_go, other_rows, save_start
from plaudit.runtime.settings import MIRRORS
from plaudit.runtime.worker import Doing
from plaudit.settings.tree import Settings, to_plain
from plaudit.support.errors import Stopped
from plaudit.support.fields import leaves, refuse
from plaudit.support.rooms import optional
from plaudit.types import Group, Role, Stats


class Job:
    """Builds the parts of one run from its settings, and trains it."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        store: Store,
        resume: str | None,
        reporter: Reporter,
        *,
        record: RecordedRun | None = None,
    ):
        """`record`: the recorded run that this run replays instead of sampling."""
        self.settings, self.folder, self.store, self.reporter = settings, folder, store, reporter
        self.record = record
        self.files = ExitStack()
        self.events = Events(folder / records.EVENTS)
        self.outage: Outage | None = None
        """Waits for failed rewards; None if the run does not sample."""
        self.rests: Rests | None = None
        """Measures idle time of rollouts; None if the run does not sample."""
        elsewhere = ("judge", "http")
        self.functions = [None if one.kind in elsewhere else function_reward(one) for one in settings.rewards]
        """Loaded once, so that a file that is edited later is not loaded again after the loss of a rank."""
        self.objective: Objective = settings.objective
        self.intake = Intake(settings, self.objective, reporter.say)
        self.data, self.tokenizer = self.intake.data, self.intake.tokenizer
        self.check_functions()
        self.total_steps = self.intake.steps
        """Steps of the run; a replay ends earlier if its record does."""
        passes = settings.learn.micro_tokens, settings.learn.score_tokens
        self.restart = Restart(
            store,
            resume,
            passes=passes,
            longest=self.intake.longest.tokens,
            rollback_rate=settings.learn.rollback_rate,
            say=reporter.say,
            mirrors=MIRRORS in settings.runtime.mesh,
        )
        for doubt in few_steps(settings, self.total_steps):
            reporter.say(f"warning: {doubt}")
        self.last_step = self.total_steps if record is None else min(self.total_steps, record.steps)
        if resume is not None and other_rows(folder, self.data.report.json()):
            reporter.say("warning: the data has changed since this run read it: from here, rows have another order")

    def check_functions(self) -> None:
        """Raise SettingsError for a reward function that cannot be called with the columns that the rows have."""
        functions = [one for one in self.functions if isinstance(one, FunctionReward)]
        prompts = self.data.items[:LOOKED_AT] if functions else ()
        refuse([why for one in functions if (why := one.lacking(prompts))], plain=True)

    def plan(self) -> Plan:
        """Return what training ranks need besides the settings, such as the checkpoint and the sizes of passes."""
        begin = self.restart
        passes = begin.micro_tokens, begin.score_tokens
        folder, intake = self.store.folder.resolve(), self.intake
        return Plan(folder, begin.resume, self.total_steps, intake.longest, passes, intake.as_chat, begin.mirrored)

    @property
    def refers_again(self) -> bool:
        """True if rows are read more than once and not streamed, and the reference is frozen. An offline run then
        computes its log-probs once, before training."""
        settings = self.settings
        frozen = Role.REFERENCE in self.objective.asks and not settings.reference.ema and not settings.data.stream
        return frozen and self.total_steps * settings.train.batch_size > self.data.cursor(settings.seed).length

    # --- learners, rollout, rewards

    def reward(self, executor: Executor, doing: Doing) -> Reward:
        """The run's reward: the weighted sum of the listed rewards, each of which is a part under its name."""
        timed, parts = partial(doing, "rewards", "scores"), list[tuple[Reward, float, str]]()
        for settings, function in zip(self.settings.rewards, self.functions, strict=True):
            if function is not None:
                own = TimedReward(executor.function(settings, function), timed)
                parts.append((own, settings.weight, function.name))
            elif settings.kind == "judge":
                judge = executor.judge(settings, self.tokenizer)
                judge.doing = timed
                parts.append((judge, settings.weight, settings.name or "judge"))
            else:
                remote = HttpReward(settings, vocabulary=vocabulary_digest(self.tokenizer.get_vocab()))
                parts.append((TimedReward(remote, timed), settings.weight, remote.name))
        return WeightedReward(parts, renormalise=self.settings.shaping.renormalise)

    def source(self, executor: Executor, stop: list[int]) -> tuple[BatchSource, Rollouter | None]:
        settings, cursor = self.settings, self.data.cursor(self.settings.seed)
        if not isinstance(self.objective, Algorithm):
            batch_size = settings.train.batch_size
            return OfflineSource(self.data.items, cursor, batch_size=batch_size, unit=self.objective.unit), None
        rollouter = None if self.record is not None else self.rollouter(executor, self.objective)
        self.rests = None if rollouter is None else Rests(rollouter)
        groups = self.record or self.rests
        assert groups is not None
        self.outage = None if rollouter is None else self.waiting(rollouter, stop)
        repair = None if self.outage is None else self.outage.repaired
        source = LastingSource(
            self.data.items,
            cursor,
            groups,
            self.objective,
            prompts_per_step=settings.rollout.prompts_per_step,
            max_lag=settings.rollout.max_lag,
            repair=repair,
            lost=executor.pinned,
            say=self.reporter.say,
        )
        return source, rollouter

    def waiting(self, rollouter: Rollouter, stop: list[int]) -> Outage:
        most, patience = self.settings.rollout.max_failed, self.settings.rollout.reward_patience
        return Outage(rollouter.again, most=most, patience=patience, stop=stop, say=self.reporter.say)

    def rollouter(self, executor: Executor, method: Algorithm) -> Rollouter:
        plan, s, doing = method.plan(self.settings.rollout.draw()), self.settings, self.events.doing
        return LastingRollouter(executor.sampler(doing), self.reward(executor, doing), s.shaping, plan, seed=s.seed)

    # --- the run

    @classmethod
    def trial(cls, settings: Settings, folder: Path) -> Job:
        """A job whose parts are measured: it saves nothing and is silent."""
        return cls(settings, folder, Store(folder / records.CHECKPOINTS), None, Reporter(quiet=True))

    def executors(self, say: Callable[[str], None], settings: Settings | None = None) -> Executors:
        """Return `Executors` for `settings`, or else for this job's own settings."""
        return Executors(settings or self.settings, say)

    async def train(self, executors: Executors, stop: list[int], further: Iterable[Hook] = ()) -> Progress:
        """Open an executor and train, from the checkpoint to resume if there is one. After an error of GOES_BACK, do so
        again from where `restart` says, unless it raises the error."""
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
        """Train with one executor. Keep no reference to its models afterwards, since another executor may follow."""
        executor = await unless(stop, executors.open(self.plan()))
        return await executor.watched(self._train(executor, stop, further))

    async def _train(self, executor: Executor, stop: list[int], further: Iterable[Hook]) -> Progress:
        settings, resume = self.settings, self.restart.resume
        models = executor.models()
        source, rollouter = self.source(executor, stop)
        memory: dict[str, float] = {}
        best = Best(settings.evaluate.best, settings.evaluate.patience)
        progress = Progress()

        def ended(progress: Progress) -> bool:
            return progress.step >= self.last_step or best.exhausted

        if (back := executor.back) is not None:
            progress = restored(back.values, back.rng, source, memory, best)
            self.reporter.say(f"the ranks' mirrors had step {progress.step} of {self.total_steps}")
        elif resume is not None:
            progress = await restore(self.store, resume, models, source, memory, best)
            save_start(self.folder, settings, self.data.report.json())  # a refused start has changed nothing
            left = "; the run is finished" if ended(progress) else ""
            self.reporter.say(f"resumed {resume}: step {progress.step} of {self.total_steps}{left}")
        progress = self.restart.begun(progress)
        models = replace(models, rate=progress.rate)
        await check_start(models, str(resume or settings.model.path))
        await executor.publish(progress.step)
        if self.refers_again and isinstance(source, OfflineSource):
            source.items = await with_reference(source.items, models, unit=self.objective.unit)
        with (
            self.reporter.track(settings.method, self.total_steps, done=progress.step) as bar,
            self.trackers(progress) as trackers,
            self.files,
        ):
            showing = Track(trackers, every=settings.train.log_every), bar
            hooks = self.hooks(executor, models, source, rollouter, best, progress, *showing, further=further)
            saver = self.saver(executor, models, source, memory, best, progress)
            try:
                async with saver.ends():
                    progress = await train(
                        source,
                        models,
                        executor.publish,
                        [*hooks, During(saver, "saves", self.events.doing)],
                        training=executor.training,
                        until=ended,
                        stop=lambda: bool(stop),
                        progress=progress,
                        memory=memory,
                        seed=settings.seed,
                    )
            except Stopped as stopped:  # the signal came while the run waited for rewards
                raise Stopped(stop[0], bar.done) if stop else stopped from None
        if stop and not ended(progress):
            raise Stopped(stop[0], progress.step)
        for line in best.summary(early=progress.step < self.last_step):
            self.reporter.say(line)
        return progress

    def trackers(self, progress: Progress) -> AbstractContextManager[list[Tracker]]:
        """Open the trackers of `log.trackers`."""
        opened: AbstractContextManager[list[Tracker]] = nullcontext([])
        if (log := self.settings.log).trackers:
            room = optional("trackers", asked_by="log.trackers")
            opened = room.opened_trackers(log, self.folder, to_plain(self.settings), resumed_after=progress.step)
        return opened

    def hooks(
        self,
        executor: Executor,
        models: Models,
        source: BatchSource,
        rollouter: Rollouter | None,
        best: Best,
        progress: Progress,
        track: Track,
        bar: ProgressBar,
        *,
        further: Iterable[Hook],
    ) -> list[Hook]:
        settings = self.settings
        metrics, alarms = self.lines(records.METRICS, progress), self.lines(records.HEALTH, progress)
        samples = self.samples(models, progress)
        self.files.enter_context(self.events).cut(progress.step)
        hooks: list[Hook] = [RecordEvents(self.events), self.begun, *([self.rests] if self.rests else [])]
        if self.data.validation and self.record is None:
            due = Due(settings.evaluate.interval, at_end=True)
            due.start(progress)
            evaluate = Evaluate(due, self.validation(models, rollouter, samples.validated))
            hooks += [During(evaluate, "evaluates", self.events.doing), best]
        hooks.extend((*further, *self.recorders(executor, progress)))
        hooks.append(RecordMetrics(metrics))
        if self.objective.online:
            hooks.append(samples)
        hooks.append(track)
        if settings.log.page and (page_room := optional("page")) is not None:
            title, path = f"{settings.method}: {self.folder.name}", self.folder / records.PAGE
            hooks.append(
                page := page_room.ShowPage(path, executor, title=title, steps=self.last_step, metrics=metrics.path)
            )
            if self.outage is not None:
                self.outage.listeners.append(page.paused)
        health = self.health(progress)
        earlier = read_jsonl(alarms.path) if alarms.path.exists() else ()
        hooks.append(Speak(self.reporter, bar, health, alarms, track, every=settings.train.log_every, earlier=earlier))
        return hooks

    def health(self, progress: Progress) -> Health:
        """Health rules for the run's figures, with the figures of its earlier steps."""
        unused = [one for one in self.settings.rewards if one.weight == 0 and one.kind in ("judge", "http")]
        held_out = [f"reward/{one.name or one.kind}" for one in unused]
        left_out = [*self.settings.log.dismiss, *(["sampler"] if self.settings.rollout.reshaped else ())]
        pairs = zip(self.settings.rewards, self.functions, strict=True)
        names = {(function.name if function else one.name or one.kind): one for one, function in pairs}
        health = Health(
            left_out,
            truths=["reward/gold", *held_out],
            planned=planned(self.settings, self.folder),
            rewards={name: one.kind for name, one in names.items() if one.weight},
            settings={leaf.key: leaf.value for leaf in leaves(self.settings)},
        )
        if progress.step:
            health.resume(read_jsonl(self.folder / records.METRICS))
        return health

    def saver(
        self,
        executor: Executor,
        models: Models,
        source: BatchSource,
        memory: dict[str, float],
        best: Best,
        progress: Progress,
    ) -> SaveCheckpoint:
        """Return the last hook, which saves checkpoints."""
        due = Due(self.settings.save.interval, at_end=True)
        due.start(progress)
        more: dict[str, Any] = {"save": executor.save, "written": executor.written, "mirror": executor.mirror}
        return SaveCheckpoint(self.store, due, models, source, memory, best, keep=self.settings.save.keep, **more)

    async def begun(self, moment: Moment) -> Stats:
        """After the first step, remove the run that this run overwrites."""
        let_go(self.folder)
        if self.store.copies is not None:
            self.store.copies.let_go()
        return {}

    def lines(self, name: str, progress: Progress) -> JsonLines:
        """Open a file of JSON lines in the run's folder, without the lines of steps after `progress`."""
        lines = self.files.enter_context(JsonLines(self.folder / name))
        lines.truncate_after(progress.step)
        return lines

    def samples(self, models: Models, progress: Progress) -> RecordSamples:
        return self.files.enter_context(
            recording(
                self.folder / records.SAMPLES,
                lambda tokens: str(self.tokenizer.decode(tokens)),
                models.watched_rows,
                budget=round(self.settings.log.samples_megabytes * 1e6),
                steps=self.last_step,
                after=progress.step,
            )
        )

    def recorders(self, executor: Executor, progress: Progress) -> Iterable[Hook]:
        """Hooks that record the run's groups, or compare the run with a record."""
        groups = self.lines(records.GROUPS, progress)
        if self.settings.rollout.record and self.objective.online:
            yield RecordGroups(groups, after=progress.step, threads=executor.threads)
        if self.record is not None:
            yield Compare(Run(self.record.path.parent).metrics, self.reporter.say)

    def validation(
        self, models: Models, rollouter: Rollouter | None, record: Callable[[Sequence[Group]], None]
    ) -> Callable[[], Awaitable[Stats]]:
        """Return a function that computes figures on the validation items: the loss for offline methods, rewards of
        fresh answers for online ones."""
        items = self.data.validation[: self.settings.evaluate.limit]
        if rollouter is None:
            return validation_loss(models, items)
        plan = (self.settings.rollout.draw(),)
        parts = rollouter.engine, rollouter.reward, rollouter.shaping
        held_out = LastingRollouter(*parts, plan, seed=rollouter.seed + 1)
        assert self.outage is not None, "every sampling run can wait for rewards"
        return partial(validation_rewards, held_out, items, self.outage.waited, record)
