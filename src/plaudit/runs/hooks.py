"""The hooks of a run, in their order, with the files that they write.

a step -> events -> evaluation -> the caller's hooks -> groups, metrics, samples -> trackers, page, lines and health
       -> checkpoint
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from plaudit.executors.base import Executor
from plaudit.loop.checkpoint import Store
from plaudit.loop.hooks import (
    Due,
    During,
    Evaluate,
    RecordEvents,
    RecordMetrics,
    RunState,
    SaveCheckpoint,
    Track,
    validation_loss,
)
from plaudit.loop.models import Models
from plaudit.loop.progress import Hook, Moment, Progress
from plaudit.loop.recorded import RecordGroups
from plaudit.loop.rollouts import Rollouts
from plaudit.loop.samples import recording
from plaudit.loop.speak import Speak
from plaudit.monitor.console import ProgressBar, Reporter
from plaudit.monitor.events import Events
from plaudit.monitor.health import Health
from plaudit.monitor.sinks import JsonLines, Tracker, read_jsonl
from plaudit.runs import records
from plaudit.runs.planned import planned
from plaudit.settings.tree import Settings, to_plain
from plaudit.support.fields import leaves
from plaudit.support.rooms import optional
from plaudit.types import Stats


class RunHooks:
    """Makes the hooks of a run, again for each executor."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        events: Events,
        reporter: Reporter,
        tokenizer: Any,
        rewards: Sequence[str],
    ):
        """`rewards`: the names of the rewards in the settings, in their order."""
        self.settings, self.store, self.folder = settings, store, store.folder.parent
        self.events, self.reporter, self.tokenizer = events, reporter, tokenizer
        self.rewards = dict(zip(rewards, settings.rewards, strict=True))

    @asynccontextmanager
    async def opened(
        self,
        executor: Executor,
        models: Models,
        state: RunState,
        progress: Progress,
        bar: ProgressBar,
        *,
        rollouts: Rollouts | None,
        held_out: Sequence[Any],
        further: Iterable[Hook],
        steps: int,
    ) -> AsyncIterator[list[Hook]]:
        """Open trackers and files, drop records of steps after `progress`, and yield the hooks. If the block raises,
        save the last finished step. `held_out`: items to evaluate on (empty: no evaluation). `further`: the caller's
        hooks. `steps`: the run's last step."""
        settings, log = self.settings, self.settings.log
        with ExitStack() as files:
            trackers: list[Tracker] = []
            if log.trackers:
                plain, room = to_plain(settings), optional("trackers", asked_by="log.trackers")
                opened = room.opened_trackers(log, self.folder, plain, resumed_after=progress.step)
                trackers = files.enter_context(opened)
            track = Track(trackers, every=settings.train.log_every)
            names = (records.METRICS, records.HEALTH, records.GROUPS)
            metrics, alarms, groups = (files.enter_context(self._lines(name, progress)) for name in names)
            budget = round(log.samples_megabytes * 1e6)
            given = self.folder / records.SAMPLES, self._decode, models.watched_rows
            samples = files.enter_context(recording(*given, budget=budget, steps=steps, after=progress.step))
            files.enter_context(self.events).cut(progress.step)
            hooks: list[Hook] = [RecordEvents(self.events), self._begun, *([rollouts.rests] if rollouts else [])]
            if held_out:
                if rollouts is None:
                    figures = validation_loss(models, held_out)
                else:
                    figures = rollouts.validation(held_out, samples.validated)
                evaluate = Evaluate(Due(settings.evaluate.interval, at_end=True, since=progress), figures)
                hooks += [During(evaluate, "evaluates", self.events.doing), state.best]
            hooks.extend(further)
            if settings.rollout.record and models.objective.online:
                hooks.append(RecordGroups(groups, after=progress.step, threads=executor.threads))
            hooks.append(RecordMetrics(metrics))
            if models.objective.online:
                hooks.append(samples)
            hooks.append(track)
            if log.page and (room := optional("page")) is not None:
                title, path = f"{settings.method}: {self.folder.name}", self.folder / records.PAGE
                page = room.ShowPage(path, executor, title=title, steps=steps, metrics=metrics.path)
                hooks.append(page)
                if rollouts is not None:
                    rollouts.outage.listeners.append(page.paused)
            earlier = read_jsonl(alarms.path) if alarms.path.exists() else ()
            told = self.reporter, bar, self._health(progress), alarms, track
            hooks.append(Speak(*told, every=settings.train.log_every, earlier=earlier))
            calls: dict[str, Any] = {"save": executor.save, "written": executor.written, "mirror": executor.mirror}
            due = Due(settings.save.interval, at_end=True, since=progress)
            saver = SaveCheckpoint(self.store, due, models, state, keep=settings.save.keep, **calls)
            async with saver.ends():
                yield [*hooks, During(saver, "saves", self.events.doing)]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def _lines(self, name: str, progress: Progress) -> JsonLines:
        """Return a file of JSON lines in the run's folder, without the lines of steps after `progress`."""
        lines = JsonLines(self.folder / name)
        lines.truncate_after(progress.step)
        return lines

    async def _begun(self, moment: Moment) -> Stats:
        """A hook: after the first step, delete the run that this run overwrites."""
        records.let_go(self.folder)
        if self.store.copies is not None:
            self.store.copies.let_go()
        return {}

    def _health(self, progress: Progress) -> Health:
        """Return the health rules for this run, which have read the figures of its earlier steps."""
        unused = [one for one in self.settings.rewards if one.weight == 0 and one.kind in ("judge", "http", "llm")]
        held_out = [f"reward/{one.name or one.kind}" for one in unused]
        left_out = [*self.settings.log.dismiss, *(["sampler"] if self.settings.rollout.reshaped else ())]
        left_out += ["kl"] if self.settings.algorithm.has_teacher else []  # it is large at first, and falls
        health = Health(
            left_out,
            truths=["reward/gold", *held_out],
            planned=planned(self.settings, self.folder),
            rewards={name: one.kind for name, one in self.rewards.items() if one.weight},
            settings={leaf.key: leaf.value for leaf in leaves(self.settings)},
        )
        if progress.step:
            health.resume(read_jsonl(self.folder / records.METRICS))
        return health
