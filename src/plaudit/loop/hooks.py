"""Hooks that run after each step: records, samples, evaluation, checkpoints.

A hook takes a Moment and returns further figures. Order matters: evaluation adds figures, then they are recorded, then
a checkpoint is taken that includes the records.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from plaudit.algorithms.figures import merge_stats
from plaudit.batch import Batch
from plaudit.loop.best import Best
from plaudit.loop.checkpoint import Store, moved, write_state
from plaudit.loop.copies import STATE, Away, UnwritableError
from plaudit.loop.finite import NonFiniteError, diverged
from plaudit.loop.models import Models
from plaudit.loop.progress import BatchSource, Hook, Moment, Progress, Remembered
from plaudit.loop.settings import Every
from plaudit.loop.train import GOES_BACK, figures_of
from plaudit.monitor.events import Events
from plaudit.monitor.sinks import Tracker
from plaudit.rollout.figures import rollout_figures
from plaudit.rollout.rollouter import Rollouter
from plaudit.runtime.coroutines import together
from plaudit.runtime.worker import Doing
from plaudit.support.errors import Stopped
from plaudit.support.visible import visible
from plaudit.types import Group, Prompt, Row, Stats

ROUNDING = 1e-9
"""Tolerance, in epochs, for the rounding of sums of fractions of an epoch."""


class Sink(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...


class Due:
    """True when something is due after a step: by steps, epochs or seconds, and at the end if `at_end`."""

    def __init__(self, every: Every, *, at_end: bool, since: Progress | None = None):
        """`since`: where counting starts, so that a resumed run does not save at once."""
        self.every, self.at_end, since = every, at_end, since or Progress()
        self._epochs, self._seconds = since.epochs_done, since.seconds

    def __call__(self, progress: Progress, *, last: bool) -> bool:
        every = self.every
        due = every.steps is not None and progress.step % every.steps == 0
        if every.epochs is not None:
            done = progress.epochs_done + ROUNDING
            due = due or done // every.epochs > (self._epochs + ROUNDING) // every.epochs
            self._epochs = progress.epochs_done
        if every.seconds is not None and progress.seconds - self._seconds >= every.seconds:
            self._seconds, due = progress.seconds, True
        return due or (last and self.at_end)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude the time spent inside from the seconds until the next one is due."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started


class RecordMetrics:
    """Write one JSON line per step."""

    def __init__(self, sink: Sink):
        self.sink = sink

    async def __call__(self, moment: Moment) -> Stats:
        progress = moment.progress
        tokens = 0 if moment.batch is None else int(moment.batch.tokens.shape[0])
        seconds = moment.stats["time/step"]
        more = {"tokens": float(progress.tokens), "tokens_per_second": tokens / seconds}
        if progress.rollbacks:
            more["rollbacks"] = float(progress.rollbacks)
        record = {"step": progress.step, "epoch": progress.epoch, "time": round(progress.seconds, 3)}
        self.sink.write(record | moment.stats | more)
        return more


class RecordEvents:
    """Record when this step waited, learned and published. As the first hook: later hooks count to the next step."""

    def __init__(self, events: Events):
        self.events = events

    async def __call__(self, moment: Moment) -> Stats:
        version, spent, end = moment.progress.step, moment.stats, self.events.clock()
        begin = end - spent["time/step"]
        sampled = begin + spent["time/batch"]
        learned = sampled + spent["time/learn"]
        stretches = (("waits", begin, sampled), ("learns", sampled, learned), ("publishes", learned, end))
        for phase, since, until in stretches:
            self.events.add("learner", phase, since, until, version - 1)
        self.events.cut(version)
        return self.events.spent()


class During:
    """Wrap a hook and record its time as a phase of the learner."""

    def __init__(self, hook: Hook, phase: str, doing: Doing):
        self.hook, self.phase, self.doing = hook, phase, doing

    async def __call__(self, moment: Moment) -> Stats | None:
        with self.doing("learner", self.phase):
            return await figures_of(self.hook, moment)


class Evaluate:
    """Compute validation figures when due, as `validation/...`."""

    def __init__(self, due: Due, figures: Callable[[], Awaitable[Stats]]):
        self.due, self.figures = due, figures

    async def __call__(self, moment: Moment) -> Stats:
        if not self.due(moment.progress, last=moment.last) or moment.failed:
            return {}
        with self.due.apart(), diverged(moment.progress.step):
            figures = await self.figures()
        return {f"validation/{name}": value for name, value in figures.items()}


def validation_loss(models: Models, items: Sequence[Sequence[Row]]) -> Callable[[], Awaitable[Stats]]:
    """Return a function that computes losses and figures on held-out rows; `loss/<role>` is renamed to `loss`."""
    rows = [row for item in items for row in item]
    return partial(_validation_loss, models, Batch.of(rows, unit=models.objective.unit))


async def _validation_loss(models: Models, batch: Batch) -> Stats:
    figures = []
    batch = models.objective.weigh(await models.annotate(batch))
    for role, actor in models.trained.items():
        stats = await actor.evaluate(batch)
        figures.append({"loss" if name == f"loss/{role}" else name: value for name, value in stats.items()})
    return merge_stats(figures)


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run that a checkpoint saves besides progress, random generator, models and optimizers."""

    source: BatchSource
    memory: dict[str, float]
    """Numbers that the method's `credit` keeps between steps, such as PPO's KL coefficient."""
    best: Best

    def values(self) -> dict[str, Any]:
        return {"source": self.source.state(), "memory": dict(self.memory), "best": self.best.state()}

    def restore(self, values: Mapping[str, Any], rng: Tensor) -> Progress:
        """Restore these and torch's random generator from saved values; return the saved progress."""
        values = json.loads(json.dumps(values))  # a copy, as if from a file: they may be restored again
        self.source.restore(values["source"])
        self.memory.clear()
        self.memory.update(values["memory"])
        self.best.restore(values.get("best"))
        torch.set_rng_state(rng)
        return Progress(**values["progress"])


class SaveCheckpoint:
    """Save a checkpoint when due, after the best evaluation so far, and at the run's end.

    A step waits only while its state is copied. The copy is written and committed in the background, one at a time; an
    error there is raised after the next step. The newest `keep` checkpoints and the best one are kept; none is deleted
    while updates are being skipped as not finite. Values that are not finite are never committed.
    """

    def __init__(
        self,
        store: Store,
        due: Due,
        models: Models,
        state: RunState,
        *,
        keep: int,
        save: Callable[[str, Path], Awaitable[None]],
        written: Callable[[Mapping[str, Path], Callable[[], None], Away | None], Awaitable[None]],
        mirror: Callable[[Remembered], Awaitable[None]],
    ):
        """`save` copies a role's model, to be written to a folder; `written` writes everything that was copied
        and commits it; `mirror` copies the ranks' state after a step to other nodes."""
        self.store, self.due, self.models, self.state, self.keep = store, due, models, state, keep
        self.save, self.written, self.mirror = save, written, mirror
        self._unsaved: Remembered | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, moment: Moment) -> Stats:
        due = self.due(moment.progress, last=moment.last)
        self._unsaved = now = self._now(moment.progress)
        if due or moment.stopping or self.state.best.now(moment.progress):
            with self.due.apart():
                await self._save(now)
        if moment.last or moment.stopping:
            await self._committed()
            return {}
        if self._writing is not None and self._writing.done():
            await self._committed()
        await self.mirror(now)
        return {}

    @asynccontextmanager
    async def ends(self) -> AsyncIterator[None]:
        """If an error or a signal ends what is inside, save the last finished step; but not if weights have changed
        since, nor after an UnwritableError or an error of GOES_BACK. At the end wait for the checkpoint that is being
        written, then close the source of batches."""
        try:
            yield
        except GOES_BACK:
            raise
        except (Exception, Stopped) as error:
            await self._last(error)
            raise
        else:
            await self._committed()
        finally:
            with suppress(Exception):  # the error that is being raised ends the run
                await self._committed()
            await self.state.source.close()

    async def _last(self, error: BaseException) -> None:
        """Commit the last finished step unless it is committed already or weights have changed since. Add a note to the
        error that names the newest checkpoint."""
        if isinstance(error, UnwritableError):  # its message names that checkpoint already
            return
        what = "The last checkpoint"
        try:
            await self._committed()
            if self._unsaved is not None and self._unsaved.moves == self.models.moves:
                what = f"Step {self._unsaved.progress.step}"
                await self._save(self._unsaved)
                await self._committed()
        except Exception as further:  # noqa: BLE001  # the run ends with `error`, whatever this one is
            error.add_note(f"{what} could not be saved: {further}")
        error.add_note(self.store.left())

    async def _committed(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises the error of that write."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))  # cancelling the wait does not cancel the write
            writing, self._writing = self._writing, None
            writing.result()

    def _now(self, progress: Progress) -> Remembered:
        values = {"progress": progress.state(), **self.state.values()}
        return Remembered(progress, values, torch.get_rng_state(), self.models.moves)

    async def _save(self, remembered: Remembered) -> None:
        """Copy the state and start to write it in the background. Raises NonFiniteError if a value is not finite."""
        await self._committed()
        progress, memory = remembered.progress, remembered.values["memory"]
        if not (await self.models.sound(whole=True) and all(map(math.isfinite, memory.values()))):
            raise NonFiniteError(
                f"weights or moments are not finite after step {progress.step}, which was not saved. Lower the "
                "learning rate.",
                suspect=progress.step,
            )
        actors: dict[str, Any] = {}
        part = secrets.token_hex(4)  # a rank that was replaced may still be writing
        folders = {name: self.store.staging(name, part) for name in (STATE, *self.models.saved)}
        with self.store.writing(self.store.folder / STATE / progress.name):
            for role, actor in self.models.trained.items():
                actors[role] = await actor.save(folders[STATE] / f"{role}.safetensors")
            for role in self.models.saved:
                await self.save(role, folders[role])
        values = {**remembered.values, "actors": actors}
        writing = self._write(progress, folders, {"rng": remembered.rng}, values, self.state.best.checkpoint)
        self._writing = asyncio.ensure_future(writing)
        # Read the task's error: asyncio would print it if the run goes back to a checkpoint before anything waits.
        self._writing.add_done_callback(lambda writing: writing.cancelled() or writing.exception())
        self._unsaved = None

    async def _write(
        self,
        progress: Progress,
        folders: Mapping[str, Path],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        best: str | None,
    ) -> None:
        name, copies = progress.name, self.store.copies
        state = partial(write_state, tensors, values)
        writers = {role: partial(moved, folder) for role, folder in folders.items() if role != STATE}
        commit = partial(self.store.write, name, writers, tensors, values, ahead=folders[STATE])
        with self.store.writing(self.store.folder / STATE / name):
            await self.written(folders, commit, None if copies is None else (copies, name, state))
        await asyncio.to_thread(self.store.copy)
        if not progress.skipped:
            await asyncio.to_thread(self.store.prune, self.keep, spare=best)


async def validation_rewards(
    rollouter: Rollouter,
    prompts: Sequence[Prompt],
    waited: Callable[[Sequence[Group]], Awaitable[Sequence[Group]]],
    record: Callable[[Sequence[Group]], None],
) -> Stats:
    """Sample answers to held-out prompts, with the same seeds every time, and return figures of their rewards and
    lengths. `waited` waits for failed rewards and returns the groups; `record` then receives these groups."""
    groups = await waited(await together(rollouter.rollout(index, prompt) for index, prompt in enumerate(prompts)))
    record(groups)
    return rollout_figures(groups)


class Track:
    """Send the figures of every step to trackers such as TensorBoard, and every `every` steps the answers to one
    prompt."""

    def __init__(self, trackers: Sequence[Tracker], *, every: int):
        self.trackers, self.every = trackers, every

    async def __call__(self, moment: Moment) -> Stats:
        step, groups = moment.progress.step, moment.delivery.groups
        for tracker in self.trackers:
            tracker.write(step, moment.stats)
        if groups and self.trackers and (step % self.every == 0 or step == 1 or moment.last):
            self.text(step, "answers", group_text(groups[0]))
        return {}

    def text(self, step: int, name: str, text: str) -> None:
        for tracker in self.trackers:
            tracker.text(step, name, text)


def group_text(group: Group) -> str:
    """Return a prompt and its answers with their rewards as text."""
    answers = [f"reward {one.reward}: {one.completion.text}" for one in group.responses]
    return visible("\n\n".join([f"prompt: {group.prompt.text}", *answers]))
