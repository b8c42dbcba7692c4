"""What happens after a step beside learning: records, samples, evaluation, checkpoints.

A hook takes a Moment and returns further figures. Order matters: evaluation adds figures, then they are recorded, then
a checkpoint is taken that the records lead up to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from plaudit.batch import Batch
from plaudit.loop.best import Best
from plaudit.loop.cast import Cast
from plaudit.loop.checkpoint import Store, Writer
from plaudit.loop.progress import BatchSource, Moment, Progress
from plaudit.loop.settings import EverySettings
from plaudit.loop.train import diverged
from plaudit.monitor.console import Reporter, Tracker, step_line
from plaudit.monitor.health import Health
from plaudit.monitor.trackers import Tracker as Figures
from plaudit.rollout.rollouter import Rollouter, rollout_figures
from plaudit.runtime.coroutines import together
from plaudit.types import Group, Prompt, Stats, merge_stats


class Sink(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...


class Due:
    """Whether something is due after a step: every so many steps, epochs or seconds, and at the end if asked."""

    def __init__(self, every: EverySettings, *, at_end: bool):
        self.every, self.at_end = every, at_end
        self._epochs = 0
        self._seconds = 0.0

    def start(self, progress: Progress) -> None:
        """Go on from here: a resumed run does not save at once."""
        self._epochs, self._seconds = progress.epochs_done, progress.seconds

    def __call__(self, progress: Progress, *, last: bool) -> bool:
        every = self.every
        due = every.steps is not None and progress.step % every.steps == 0
        if every.epochs is not None:
            due = due or progress.epochs_done // every.epochs > self._epochs // every.epochs
            self._epochs = progress.epochs_done
        if every.seconds is not None and progress.seconds - self._seconds >= every.seconds:
            self._seconds, due = progress.seconds, True
        return due or (last and self.at_end)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is due, and takes place within it, counts for nothing among the seconds until it is due again."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started


class RecordMetrics:
    """One JSON line a step."""

    def __init__(self, sink: Sink):
        self.sink = sink

    async def __call__(self, moment: Moment) -> Stats:
        progress = moment.progress
        tokens = 0 if moment.batch is None else int(moment.batch.tokens.shape[0])
        seconds = moment.stats["time/step"]
        more = {"tokens": float(progress.tokens), "tokens_per_second": tokens / seconds}
        record = {"step": progress.step, "epoch": progress.epoch, "time": round(progress.seconds, 3)}
        self.sink.write(record | moment.stats | more)
        return more


class RecordSamples:
    """Every `every`-th step's first groups: prompt, completion, rewards by part, advantage, versions."""

    def __init__(self, sink: Sink, *, every: int, groups: int):
        self.sink, self.every, self.groups = sink, every, groups

    async def __call__(self, moment: Moment) -> Stats:
        if moment.progress.step % self.every == 0 or moment.last:
            advantages = {} if moment.batch is None else row_advantages(moment.batch)
            for group in moment.delivery.groups[: self.groups]:
                for record in sample_records(group, advantages):
                    self.sink.write({"step": moment.progress.step} | record)
        return {}


def row_advantages(batch: Batch) -> dict[tuple[int, tuple[int, ...]], list[float]]:
    """Mean advantages of the rows, by their group and tokens, which several answers may share."""
    if batch.advantages is None:
        return {}
    found: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    sizes = batch.lengths.tolist()
    parts = (torch.split(column, sizes) for column in (batch.tokens, batch.trainable, batch.advantages))
    for group, tokens, trainable, advantages in zip(batch.group.tolist(), *parts, strict=True):
        found.setdefault((group, tuple(tokens.tolist())), []).append(float(advantages[trainable].mean()))
    return found


def sample_records(
    group: Group, advantages: Mapping[tuple[int, tuple[int, ...]], Sequence[float]]
) -> Iterable[dict[str, Any]]:
    """A group's responses as JSON; equal answers have their advantages in the order of their rows."""
    left = {row: iter(values) for row, values in advantages.items()}
    for number, response in enumerate(group.responses):
        completion = response.completion
        row = (group.index, (*group.prompt.tokens, *completion.tokens))
        rowless = response.greedy or response.reward is None
        yield {
            "group": group.index,
            "sample": number,
            "greedy": response.greedy,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "finish": str(completion.finish),
            "tokens": len(completion.tokens),
            "reward": response.reward,
            "score": response.score.value,
            "parts": dict(response.score.parts),
            "reason": response.score.reason,
            "advantage": None if rowless else next(left.get(row, iter(())), None),
            "logprob": statistics.fmean(completion.logprobs) if completion.logprobs else None,
            "versions": sorted(set(completion.versions)),
        }


class Evaluate:
    """Validation figures when due, as `validation/...`."""

    def __init__(self, due: Due, figures: Callable[[], Awaitable[Stats]]):
        self.due, self.figures = due, figures

    async def __call__(self, moment: Moment) -> Stats:
        if not self.due(moment.progress, last=moment.last):
            return {}
        with self.due.apart(), diverged(moment.progress.step):
            figures = await self.figures()
        return {f"validation/{name}": value for name, value in figures.items()}


async def validation_loss(cast: Cast, batch: Batch) -> Stats:
    """The loss's figures on held-out rows; the loss is called `loss` whatever the role."""
    figures = []
    batch = cast.objective.weigh(await cast.annotate(batch))
    for role, actor in cast.trained.items():
        stats = await actor.evaluate(batch)
        figures.append({"loss" if name == f"loss/{role}" else name: value for name, value in stats.items()})
    return merge_stats(figures)


Prepare = Callable[[Path], Awaitable[Writer]]
"""Gets a role's model ready to be written; the folder is one that it may use meanwhile."""


class SaveCheckpoint:
    """Commits a checkpoint when due, after the best evaluation so far, and when the run ends: models by role, then all
    that the run remembers. The newest `keep` stay, and the best."""

    def __init__(
        self,
        store: Store,
        due: Due,
        cast: Cast,
        source: BatchSource,
        memory: Mapping[str, float],
        best: Best,
        *,
        writers: Mapping[str, Prepare],
        keep: int,
    ):
        self.store, self.due, self.cast, self.source = store, due, cast, source
        self.memory, self.best, self.writers, self.keep = memory, best, writers, keep

    async def __call__(self, moment: Moment) -> Stats:
        due = self.due(moment.progress, last=moment.last)
        if due or moment.stopping or self.best.now(moment.progress):
            with self.due.apart():
                await self.save(moment.progress)
        return {}

    async def save(self, progress: Progress) -> None:
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        actors: dict[str, Any] = {}
        for role, actor in self.cast.trained.items():
            mine, values = await actor.state()
            tensors |= {f"{role}/{key}": tensor for key, tensor in mine.items()}
            actors[role] = values
        values = {
            "progress": progress.state(),
            "source": self.source.state(),
            "memory": dict(self.memory),
            "best": self.best.state(),
            "actors": actors,
        }
        writers: dict[str, Writer] = {}
        for name, prepare in self.writers.items():
            with self.store.writing(self.store.folder / name / progress.name):  # ranks on Ray write ahead of it
                writers[name] = await prepare(self.store.staging(name))
        self.store.write(progress.name, writers, tensors, values)
        self.store.prune(self.keep, spare=self.best.checkpoint)


async def restore(
    store: Store, name: str, cast: Cast, source: BatchSource, memory: dict[str, float], best: Best
) -> Progress:
    """Everything but the model weights, which whoever builds the models loads from the same checkpoint."""
    tensors, values = store.read(name)
    for role, actor in cast.trained.items():
        prefix = f"{role}/"
        mine = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        await actor.restore(mine, values["actors"][role])
    source.restore(values["source"])
    memory.clear()
    memory.update(values["memory"])
    best.restore(values.get("best"))
    torch.set_rng_state(tensors["rng"])
    store.drop_after(name)  # later ones are damaged, or of the sitting that this one replaces
    return Progress(**values["progress"])


async def validation_rewards(rollouter: Rollouter, prompts: Sequence[Prompt]) -> Stats:
    """Rewards and lengths of fresh answers to held-out prompts: the same prompts and seeds every time."""
    return rollout_figures(await together(rollouter.rollout(index, prompt) for index, prompt in enumerate(prompts)))


class Track:
    """Figures of every step to TensorBoard and the like."""

    def __init__(self, trackers: Sequence[Figures]):
        self.trackers = trackers

    async def __call__(self, moment: Moment) -> Stats:
        for tracker in self.trackers:
            tracker.write(moment.progress.step, moment.stats)
        return {}


class Speak:
    """The terminal's line of a step, every so many steps and after an evaluation, and whatever looks unhealthy."""

    def __init__(self, reporter: Reporter, tracker: Tracker, health: Health, *, every: int):
        self.reporter, self.tracker, self.health, self.every = reporter, tracker, health, every

    async def __call__(self, moment: Moment) -> Stats:
        self.tracker.advance()
        step = moment.progress.step
        ends, evaluated = moment.last or moment.stopping, any(n.startswith("validation/") for n in moment.stats)
        if step % self.every == 0 or step == 1 or ends or evaluated:
            self.reporter.say(step_line(moment.stats, self.tracker))
        for warning in self.health.check({"step": float(step)} | moment.stats):
            self.reporter.say(f"health: {warning}")
        return {}
