"""From settings to a run: the only file that names concrete classes and joins them.

settings -> intake (tokenizer, data) -> crew (training ranks, engine), rewards -> source, hooks -> train -> Run
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plaudit import records
from plaudit.algorithms.base import Algorithm, Objective
from plaudit.batch import Batch
from plaudit.checks import check
from plaudit.crew.base import Crew
from plaudit.crew.opening import Crews, check_cluster
from plaudit.evaluate.judge import judge_reward
from plaudit.intake import Intake
from plaudit.loop.best import Best
from plaudit.loop.cast import Actor, Cast
from plaudit.loop.checkpoint import Store
from plaudit.loop.hooks import (
    Due,
    Evaluate,
    RecordMetrics,
    RecordSamples,
    SaveCheckpoint,
    Speak,
    Track,
    restore,
    validation_loss,
    validation_rewards,
)
from plaudit.loop.offline import OfflineSource, with_reference
from plaudit.loop.online import OnlineSource
from plaudit.loop.progress import BatchSource, Hook, Moment, Progress, checked
from plaudit.loop.recorded import Compare, Record, RecordGroups
from plaudit.loop.train import train
from plaudit.models.load import load_tokenizer, positions
from plaudit.monitor.console import Reporter, Tracker
from plaudit.monitor.health import Health
from plaudit.monitor.sinks import JsonLines
from plaudit.monitor.trackers import opened_trackers
from plaudit.page import ShowPage, last_page
from plaudit.processes import load_judge
from plaudit.recipes import completed
from plaudit.records import Run, find_resume, let_go, named, open_folder, open_record, other_rows, save_start
from plaudit.rewards.base import Reward
from plaudit.rewards.protocol import vocabulary_digest
from plaudit.rewards.remote import HttpReward, check_servers
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.weighted import WeightedReward
from plaudit.rollout.rollouter import Rollouter
from plaudit.runtime.coroutines import finished
from plaudit.runtime.gang import Gang, Part
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.usual import usual_torch
from plaudit.runtime.worker import WorkerLost
from plaudit.settings import Settings, to_plain
from plaudit.stopping import Stopped, stop_signals, stopped_at_once, unless
from plaudit.trainer import Plan
from plaudit.types import Role, Sampling, Stats


def run(settings: Settings, *, reporter: Reporter | None = None, hooks: Iterable[Hook] = ()) -> Run:
    """Do a run and return its records; `hooks` see every step, and figures that they return are recorded with it.
    Raises SettingsError before anything starts; Stopped after SIGTERM or Ctrl-C.

    The process keeps torch's number of threads, its seed, and the way of its memory (`runtime/memory.py`)."""
    settings, hooks = named(completed(settings)), checked(hooks)
    check(settings)
    record = open_record(settings)
    if record is not None:
        settings = replace(settings, threads=record.threads)
    reporter = reporter or Reporter(quiet=settings.log.quiet)
    check_cluster(settings.runtime)
    servers = [reward for reward in settings.rewards if reward.kind == "http" and settings.samples]
    absent = [f"{one}; the other reward servers are used" for each in servers for one in finished(check_servers(each))]
    with usual_torch(), open_folder(settings) as folder:
        return _run(settings, folder, record, reporter, absent, hooks)


def _run(
    settings: Settings,
    folder: Path,
    record: Record | None,
    reporter: Reporter,
    warnings: Iterable[str],
    hooks: Iterable[Hook],
) -> Run:
    store = Store(folder / records.CHECKPOINTS)
    store.sweep()
    resume, problems = find_resume(settings, store)
    reporter.log_to(folder / records.LOG)
    for warning in (*warnings, *(f"{problem}; an older checkpoint is used" for problem in problems)):
        reporter.say(f"warning: {warning}")
    if resume is not None:
        settings = records.resumed(settings, folder, reporter.say)
    keep_freed_memory()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    torch.manual_seed(settings.seed)
    reporter.say(f"{settings.method}: logs and samples in {folder}, checkpoints in {store.folder}")
    with reporter.last_words(), last_page(folder / records.PAGE):
        with stopped_at_once():
            job = Job(settings, folder, store, resume, reporter, record=record)
            if resume is None:
                save_start(folder, settings, job.data.report.json())
        with stop_signals() as stop, Crews(settings, reporter.say) as crews:
            finished(job.train(crews, stop, hooks))
    role = next(iter(job.objective.losses()))
    reporter.say(f"done: {role} in {store.model(role)}")
    return Run(folder)


class Job:
    """Builds the parts of one run, in the order in which the methods stand, and trains."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        store: Store,
        resume: str | None,
        reporter: Reporter,
        *,
        record: Record | None = None,
    ):
        """`record`: what the run learns from, in place of samples."""
        self.settings, self.folder, self.store, self.resume, self.reporter = settings, folder, store, resume, reporter
        self.record = record
        self.files = ExitStack()
        self.restored = False
        """Went on from `resume`: there are no later checkpoints than those of this sitting."""
        elsewhere = ("judge", "http")
        self.functions = [None if one.kind in elsewhere else function_reward(one) for one in settings.rewards]
        """Taken once: a file that was edited meanwhile is not run again where a rank is lost."""
        self.objective: Objective = settings.objective
        self.intake = Intake(settings, self.objective, reporter.say)
        self.data, self.tokenizer = self.intake.data, self.intake.tokenizer
        self.total_steps = self.intake.steps
        """That the run has; a replay ends where its record does."""
        self.last_step = self.total_steps if record is None else min(self.total_steps, record.steps)
        if resume is not None and other_rows(folder, self.data.report.json()):
            reporter.say("warning: the data is not what this run has read: rows come in another order from here")

    def plan(self) -> Plan:
        """What training ranks must know."""
        return Plan(self.store.folder.resolve(), self.resume, self.total_steps, self.intake.longest)

    # --- learners, rollout, rewards

    def cast(self, gang: Gang) -> Cast:
        objective = self.objective
        trained = {role: Actor(Part(gang, role)) for role in objective.losses()}
        reference = Actor(Part(gang, Role.REFERENCE)) if Role.REFERENCE in objective.asks else None
        return Cast(objective, trained, reference, self.settings.reference.ema)

    def reward(self, crew: Crew) -> Reward:
        """The run's reward: the weighted sum of the listed ones (of one, itself, as a part under its name)."""
        parts: list[tuple[Reward, float, str]] = []
        for settings, function in zip(self.settings.rewards, self.functions, strict=True):
            if function is not None:
                parts.append((function, settings.weight, function.name))
            elif settings.kind == "judge":
                parts.append((self.judge(settings, crew), settings.weight, settings.name or "judge"))
            else:
                remote = HttpReward(settings, vocabulary=vocabulary_digest(self.tokenizer.get_vocab()))
                parts.append((remote, settings.weight, remote.name))
        return WeightedReward(parts)

    def judge(self, settings: RewardSettings, crew: Crew) -> Reward:
        if settings.workers:
            own, room = load_tokenizer(settings.path), positions(settings.path)
            return judge_reward(crew.judges(settings), own, self.tokenizer, longest=room, pause=0.005)
        judge = load_judge(self.settings, settings.path)
        engine = crew.engine
        assert engine is not None
        if crew.apart:  # others decode meanwhile: what is there is scored
            return judge.reward(self.tokenizer, pause=0.005)
        return judge.reward(self.tokenizer, busy=lambda: engine.busy)

    def sampling(self) -> Sampling:
        rollout = self.settings.rollout
        names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
        return Sampling(**{name: getattr(rollout, name) for name in names}, stop=tuple(rollout.stop))

    def source(self, crew: Crew) -> tuple[BatchSource, Rollouter | None]:
        settings, cursor = self.settings, self.data.cursor(self.settings.seed)
        if not isinstance(self.objective, Algorithm):
            batch_size = settings.train.batch_size
            return OfflineSource(self.data.items, cursor, batch_size=batch_size, unit=self.objective.unit), None
        rollouter = None if self.record is not None else self.rollouter(crew, self.objective)
        groups = self.record or rollouter
        assert groups is not None
        source = OnlineSource(
            self.data.items,
            cursor,
            groups,
            self.objective,
            prompts_per_step=settings.rollout.prompts_per_step,
            max_lag=settings.rollout.max_lag,
            max_redraw=settings.rollout.max_redraw,
            max_failed=settings.rollout.max_failed,
        )
        return source, rollouter

    def rollouter(self, crew: Crew, method: Algorithm) -> Rollouter:
        assert crew.engine is not None
        plan, settings = method.plan(self.sampling()), self.settings
        return Rollouter(crew.engine, self.reward(crew), settings.shaping, plan, seed=settings.seed)

    # --- the run

    async def train(self, crews: Crews, stop: list[int], further: Iterable[Hook] = ()) -> Progress:
        """Open a crew and train, from `resume` on; where a rank is lost, all go back to what was committed last."""
        try:
            while True:
                try:
                    crew = await unless(stop, crews.open(self.plan()))
                    return await crew.watched(self._train(crew, stop, further))
                except WorkerLost as lost:
                    crews.failures(lost)
                    self.store.sweep()
                    if self.resume is None or self.restored:  # until then it is the one that was asked for
                        self.resume = self.store.latest()[0] if self.store.names() else None
                    self.reporter.say(f"lost {lost}; going on from {self.resume or 'the start'}")
        finally:
            crews.dismiss()

    async def _train(self, crew: Crew, stop: list[int], further: Iterable[Hook]) -> Progress:
        settings = self.settings
        cast = self.cast(crew.gang)
        source, rollouter = self.source(crew)
        memory: dict[str, float] = {}
        best = Best(settings.evaluate.best, settings.evaluate.patience)
        progress = Progress()

        def ended(progress: Progress) -> bool:
            return progress.step >= self.last_step or best.exhausted

        if self.resume is not None:
            progress = await restore(self.store, self.resume, cast, source, memory, best)
            self.restored = True
            save_start(self.folder, settings, self.data.report.json())  # one that was refused has changed nothing
            left = ", nothing is left to do" if ended(progress) else ""
            self.reporter.say(f"resumed {self.resume}: step {progress.step} of {self.total_steps}{left}")
        if self.resume is not None or crew.apart:
            await crew.publish(progress.step)
        if settings.reference.once and isinstance(source, OfflineSource):
            source.items = await with_reference(source.items, cast, unit=self.objective.unit)
        with (
            self.reporter.track(settings.method, self.total_steps, done=progress.step) as tracker,
            opened_trackers(settings.log, self.folder, to_plain(settings), resumed_after=progress.step) as trackers,
            self.files,
        ):
            showing = Track(trackers), tracker
            hooks = self.hooks(crew, cast, source, rollouter, memory, best, progress, *showing, further=further)
            try:
                progress = await train(
                    source,
                    cast,
                    crew.publish,
                    hooks,
                    training=crew.training,
                    until=ended,
                    stop=lambda: bool(stop),
                    progress=progress,
                    memory=memory,
                    seed=settings.seed,
                    max_skipped=settings.learn.max_skipped,
                )
            finally:
                await source.close()
        if stop and not ended(progress):
            raise Stopped(stop[0], progress.step)
        for line in best.told(early=progress.step < self.last_step):
            self.reporter.say(line)
        return progress

    def hooks(
        self,
        crew: Crew,
        cast: Cast,
        source: BatchSource,
        rollouter: Rollouter | None,
        memory: dict[str, float],
        best: Best,
        progress: Progress,
        track: Track,
        tracker: Tracker,
        *,
        further: Iterable[Hook],
    ) -> list[Hook]:
        settings = self.settings
        metrics = self.files.enter_context(JsonLines(self.folder / records.METRICS))
        samples = self.files.enter_context(JsonLines(self.folder / records.SAMPLES))
        metrics.truncate_after(progress.step)
        samples.truncate_after(progress.step)
        hooks: list[Hook] = [self.begun]
        if self.data.validation and self.record is None:
            due = Due(settings.evaluate, at_end=True)
            due.start(progress)
            hooks += [Evaluate(due, self.validation(cast, rollouter)), best]
        hooks.extend((*further, *self.recorders(crew, progress)))
        hooks.append(RecordMetrics(metrics))
        if isinstance(self.objective, Algorithm):
            hooks.append(RecordSamples(samples, every=settings.log.samples_every, groups=settings.log.sample_groups))
        hooks.append(track)
        if settings.log.page:
            title, path = f"{settings.method}: {self.folder.name}", self.folder / records.PAGE
            hooks.append(ShowPage(path, crew, title=title, steps=self.last_step, metrics=metrics.path))
        health = Health({"sampler"} if settings.rollout.reshaped else ())
        hooks.append(Speak(self.reporter, tracker, health, every=settings.train.log_every))
        due = Due(settings.save, at_end=True)
        due.start(progress)
        roles: list[str] = list(cast.trained)
        if settings.reference.ema and cast.reference is not None:
            roles.append(Role.REFERENCE)
        writers = {role: partial(crew.writer, role) for role in roles}
        keep = settings.save.keep
        hooks.append(SaveCheckpoint(self.store, due, cast, source, memory, best, writers=writers, keep=keep))
        return hooks

    async def begun(self, moment: Moment) -> Stats:
        """After a step this run may take the place of the one that it overwrites."""
        let_go(self.folder)
        return {}

    def recorders(self, crew: Crew, progress: Progress) -> Iterable[Hook]:
        """What writes a record, and what compares with one."""
        groups = self.files.enter_context(JsonLines(self.folder / records.GROUPS))
        groups.truncate_after(progress.step)
        if self.settings.rollout.record and isinstance(self.objective, Algorithm):
            yield RecordGroups(groups, after=progress.step, threads=crew.threads)
        if self.record is not None:
            yield Compare(Run(self.record.path.parent).metrics, self.reporter.say)

    def validation(self, cast: Cast, rollouter: Rollouter | None) -> Callable[[], Awaitable[Stats]]:
        """Figures on the validation items: the loss for offline methods, rewards of fresh answers for online ones."""
        items = self.data.validation[: self.settings.evaluate.limit]
        if rollouter is None:
            batch = Batch.of([row for item in items for row in item], unit=self.objective.unit)
            return partial(validation_loss, cast, batch)
        plan = (self.sampling(),)
        held_out = Rollouter(rollouter.engine, rollouter.reward, rollouter.shaping, plan, seed=rollouter.seed + 1)
        return partial(validation_rewards, held_out, items)
