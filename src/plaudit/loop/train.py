"""The only training loop. Its source decides whether it is offline or online, synchronous or asynchronous.

    source.next -> Delivery, Batch -> annotate -> credit -> [weigh -> step] x updates -> publish -> hooks -> source.done
                                      |------------------ training -----------------|

Hooks run before `done`, so that their evaluation shares no decoding step with the next rollouts. Otherwise the
rollouts' last bits would depend on whether this step was evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import isawaitable

import torch

from plaudit.algorithms.base import Memory
from plaudit.algorithms.figures import plain
from plaudit.batch import Batch
from plaudit.loop.finite import NonFiniteError, check_weights, diverged, too_many_skipped
from plaudit.loop.models import Models
from plaudit.loop.progress import BatchSource, Delivery, Hook, Moment, Progress
from plaudit.runtime.memory import RankOutOfMemory
from plaudit.runtime.worker import WorkerLost
from plaudit.support.errors import Stopped
from plaudit.support.plugins import name_of
from plaudit.types import Stats

Publish = Callable[[int], Awaitable[Stats]]
Training = Callable[[], AbstractAsyncContextManager[None]]


class Ending:
    """An exception that ends the run after the current step, because the step's weights had already moved."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.moved = False
        """True if weights have moved, by whole updates of all models: the present state can be saved."""

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep the first exception raised inside if the step's work can be saved. Otherwise raise it at once, as well
        as errors after which the run may go back to a checkpoint."""
        try:
            yield
        except GOES_BACK:
            raise
        except (Exception, Stopped) as error:
            if not self.moved:
                raise
            self.error = self.error or error

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Mark a section in which weights move: a failure inside leaves nothing to save."""
        self.moved = False
        yield
        self.moved = True


GOES_BACK = (WorkerLost, NonFiniteError, RankOutOfMemory)
"""After these errors nothing in memory can be saved: the run goes back to a checkpoint, or ends."""


async def train(
    source: BatchSource,
    models: Models,
    publish: Publish,
    hooks: Sequence[Hook],
    *,
    training: Training = nullcontext,
    until: Callable[[Progress], bool],
    stop: Callable[[], bool] = lambda: False,
    progress: Progress,
    memory: Memory,
    seed: int,
) -> Progress:
    """Train from `progress` on until `until` is true. `publish(version)` gives the weights to the sampler and returns
    figures of it. Within `training()` only learners use the devices.

    Once `stop` is true, the run ends early after the current step: hooks see `last` for a planned end and `stopping`
    for an early one.

    An exception in any stage ends the run. It ends at once if no weights have moved since the last finished step;
    otherwise after this step, whose hooks record and save it (`stopping`, `failed`). Raises NonFiniteError in the same
    way after three steps in a row with an update that was not finite, and at once if weights are not finite.
    """
    clock = time.perf_counter()
    while not until(progress):
        started, ending = time.perf_counter(), Ending()
        with diverged(progress.step):
            delivery = await source.next()
        sampled = learned = time.perf_counter()
        batch, stats = delivery.batch, Stats()
        with ending.deferred():
            async with training():
                batch, stats = await learn(models, delivery, memory, ending, step=progress.step, seed=seed)
                learned = time.perf_counter()
        await check_weights(models, progress.step + 1)
        if ending.error is None:
            with ending.deferred():
                stats = stats | await publish(progress.step + 1)
        before, clock = clock, time.perf_counter()
        seconds = clock - started
        progress = progress.after(delivery, seconds=clock - before, skipped=stats.get("skipped", 0.0) > 0)
        stats = delivery.stats | stats
        stats |= {"time/batch": sampled - started, "time/learn": learned - sampled, "time/step": seconds}
        ending.error = ending.error or too_many_skipped(progress)
        moment = Moment(progress=progress, delivery=delivery, batch=batch, stats=stats, last=False)
        for hook in hooks:
            failed = ending.error is not None
            last = not failed and until(progress)  # `until` is asked again: an evaluation may end the run,
            stopping = not last and (failed or stop())  # and a signal during one still gets its checkpoint
            moment = replace(moment, stats=stats, last=last, stopping=stopping, failed=failed)
            with ending.deferred():
                stats = stats | await figures_of(hook, moment)
        with ending.deferred():
            await source.done(delivery)
        if ending.error is not None:
            raise ending.error
        if moment.stopping:
            break
    return progress


async def figures_of(hook: Hook, moment: Moment) -> Stats:
    """Return a hook's figures, {} for None. Raises TypeError with the hook's name."""
    figures, name = hook(moment), name_of(hook)
    return plain((await figures if isawaitable(figures) else figures) or {}, f"the figures of the hook {name}")


async def learn(
    models: Models, delivery: Delivery, memory: Memory, ending: Ending, *, step: int, seed: int
) -> tuple[Batch | None, Stats]:
    """Annotate a batch, compute credit, make optimizer steps, move an EMA reference. Return trained rows, figures."""
    if delivery.batch is None:
        ending.moved = True
        return None, {}
    batch, stats = await models.annotate(delivery.batch), staleness(delivery.batch, step)
    fresh = dict(memory)
    batch, credit = models.objective.credit(batch, fresh)
    stats |= plain(credit, "the figures of `credit`")
    fresh = plain(fresh, "the memory of `credit`")
    if all(map(math.isfinite, fresh.values())):  # else this step will be skipped; the next ones must not inherit it
        memory.update(fresh)
    stats |= await update(models, batch, ending, step=step, seed=seed)
    with ending.moving():
        await models.follow()
    return batch.trained(), stats


def staleness(batch: Batch, version: int) -> Stats:
    """Return figures of how many versions older than `version` the sampled tokens are: mean, largest, share of each
    age. Return {} for rows that were not sampled."""
    if batch.version is None:
        return {}
    age = version - batch.version[batch.version >= 0]
    if not len(age):
        return {}
    shares = {f"lag/{value}": float((age == value).float().mean()) for value in sorted(set(age.tolist()))}
    return {"lag/mean": float(age.float().mean()), "lag/max": float(age.max())} | shares


async def update(models: Models, batch: Batch, ending: Ending, *, step: int, seed: int) -> Stats:
    """Make all optimizer steps on one batch, in passes over shuffled mini-batches; one without a trained token makes no
    step. End early if the method says halt, or if an update fails after others were made."""
    passes, parts = models.objective.updates()
    units = len(batch) // batch.unit
    taken: list[Stats] = []
    for number in range(passes):
        order = None
        if parts > 1:
            mixed = (seed * 1_000_003 + step) * 101 + number
            generator = torch.Generator().manual_seed(mixed % (1 << 64))  # torch takes 64 bits
            order = torch.randperm(units, generator=generator)
        for mini in batch.split(min(parts, units), order=order):
            if batch.trainable.any() and not mini.trainable.any():
                continue
            with ending.deferred():
                taken.append(await _one_update(models, models.objective.weigh(mini).trained(), ending, step))
            if ending.error is not None or taken[-1]["halted"]:
                return _over_updates(taken)
    return _over_updates(taken)


async def _one_update(models: Models, mini: Batch, ending: Ending, step: int) -> Stats:
    """Make one optimizer step of every trained model, or of none: a critic must not move without its policy."""
    prepared, stats = await models.prepare(mini, step)
    take = not (stats["skipped"] or stats["halted"])
    with ending.moving() if take else nullcontext():
        await models.apply(prepared, take)
    return stats


def _over_updates(taken: Sequence[Stats]) -> Stats:
    """Merge the figures of a step's updates: means, extremes for names that say so, sums of skipped and halted updates,
    and the first update's gap between sampler and learner."""
    merged: Stats = {}
    for name in dict.fromkeys(name for stats in taken for name in stats):
        values = [stats[name] for stats in taken if name in stats]
        if name.endswith(("max", "min")):
            merged[name] = max(values) if name.endswith("max") else min(values)
        else:
            merged[name] = sum(values) / (1 if name in ("skipped", "halted") else len(values))
    if "kl/old" in taken[0]:
        merged["kl/sampler"] = taken[0]["kl/old"]
    return merged | {"updates": float(len(taken)) - merged["skipped"] - merged["halted"]}
