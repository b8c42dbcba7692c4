"""The only loop. Offline or online, synchronous or not: the source decides what a step learns from.

source.next -> annotate (reference, critic) -> credit -> [weigh -> step] x updates -> publish -> hooks -> source.done
               |------------------------- training -------------------------------|

Hooks come before `done`: what they sample to evaluate shares no decoding step with the next rollouts, whose last bits
would otherwise depend on whether this step was evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from inspect import isawaitable

import torch

from plaudit.algorithms.base import Algorithm, Memory
from plaudit.batch import Batch
from plaudit.loop.cast import Cast
from plaudit.loop.progress import BatchSource, Delivery, Hook, Moment, Progress
from plaudit.types import Role, Stats, plain

Publish = Callable[[int], Awaitable[None]]
Training = Callable[[], AbstractAsyncContextManager[None]]


class NonFiniteError(RuntimeError):
    """Losses or gradients were not finite in several steps in a row, or logits that answers are drawn from were not."""


async def train(
    source: BatchSource,
    cast: Cast,
    publish: Publish,
    hooks: Sequence[Hook],
    *,
    training: Training = nullcontext,
    until: Callable[[Progress], bool],
    stop: Callable[[], bool] = lambda: False,
    progress: Progress,
    memory: Memory,
    seed: int,
    max_skipped: int = 3,
) -> Progress:
    """Train from `progress` on, until `until` says so. `publish(version)` makes the weights known to the sampler;
    within `training()` the devices are the learners' alone.

    Once `stop` is true the run ends behind the step under way, early: hooks are told apart `last` and `stopping`.
    Raises NonFiniteError after `max_skipped` steps in a row with an update that was not finite; whatever a stage raises
    ends the run.
    """
    clock = time.perf_counter()
    while not until(progress):
        started = time.perf_counter()
        with diverged(progress.step):
            delivery = await source.next()
        sampled = time.perf_counter()
        async with training():
            batch, stats = await learn(cast, delivery, memory, step=progress.step, seed=seed)
        learned = time.perf_counter()
        await publish(progress.step + 1)
        before, clock = clock, time.perf_counter()
        seconds = clock - started
        progress = progress.after(delivery, seconds=clock - before, skipped=stats.get("skipped", 0.0) > 0)
        stats = delivery.stats | stats
        stats |= {"time/batch": sampled - started, "time/learn": learned - sampled, "time/step": seconds}
        stopping = False
        for hook in hooks:
            last = until(progress)  # asked anew: an evaluation may end the run,
            stopping = not last and stop()  # and a signal during one still gets its checkpoint
            moment = Moment(
                progress=progress, delivery=delivery, batch=batch, stats=stats, last=last, stopping=stopping
            )
            stats = stats | await _figures(hook, moment)
        await source.done(delivery)
        if progress.skipped >= max_skipped:
            raise NonFiniteError(
                f"a loss or gradient was not finite in {progress.skipped} steps in a row (up to step {progress.step}). "
                "No such update was made on any model, so the weights are sound. Lower the learning rate, or look at "
                "the data and rewards of these steps"
            )
        if stopping:
            break
    return progress


async def _figures(hook: Hook, moment: Moment) -> Stats:
    """What a hook returns, as plain figures; None is none. Raises TypeError that names the hook."""
    told = hook(moment)
    name = getattr(hook, "__name__", type(hook).__name__)
    if not isawaitable(told):
        raise TypeError(f"the hook {name} must be async (`async def`): it returned {told!r:.80} at once")
    return plain(await told or {}, f"the figures of the hook {name}")


@contextmanager
def diverged(step: int) -> Iterator[None]:
    """Within it answers may be drawn from what the policy has become."""
    try:
        yield
    except FloatingPointError as error:
        raise NonFiniteError(
            f"after step {step} the policy's logits are not finite, so that it answers nothing: its weights have "
            "diverged, and so may those of the newest checkpoint. Lower the learning rate, and begin anew or with an "
            "earlier one (resume=NAME)"
        ) from error


async def learn(cast: Cast, delivery: Delivery, memory: Memory, *, step: int, seed: int) -> tuple[Batch | None, Stats]:
    """Everything between a delivery and its published weights: columns, credit, optimizer steps."""
    if delivery.batch is None:
        return None, {}
    batch, stats = await cast.annotate(delivery.batch), staleness(delivery.batch, step)
    if isinstance(cast.objective, Algorithm):
        before = dict(memory)
        batch, credit = cast.objective.credit(batch, memory)
        stats |= plain(credit, "the figures of `credit`")
        memory.update(plain(memory, "the memory of `credit`"))
        if not all(map(math.isfinite, memory.values())):  # this step will be skipped; the next ones must not inherit it
            memory.clear()
            memory.update(before)
    stats |= await update(cast, batch, step=step, seed=seed)
    await cast.follow()
    return batch, stats


def staleness(batch: Batch, version: int) -> Stats:
    """How many versions older than `version` the batch's sampled tokens are: mean, largest, and the share of each age.
    Nothing for rows that were not sampled."""
    if batch.version is None:
        return {}
    age = version - batch.version[batch.version >= 0]
    if not len(age):
        return {}
    shares = {f"lag/{value}": float((age == value).float().mean()) for value in sorted(set(age.tolist()))}
    return {"lag/mean": float(age.float().mean()), "lag/max": float(age.max())} | shares


async def update(cast: Cast, batch: Batch, *, step: int, seed: int) -> Stats:
    """All optimizer steps on one batch: passes over shuffled mini-batches, ended early where the method says halt."""
    passes, parts = cast.objective.updates()
    units = len(batch) // batch.unit
    taken: list[Stats] = []
    for number in range(passes):
        order = None
        if parts > 1:
            mixed = (seed * 1_000_003 + step) * 101 + number
            generator = torch.Generator().manual_seed(mixed % (1 << 64))  # torch takes 64 bits
            order = torch.randperm(units, generator=generator)
        for mini in batch.split(min(parts, units), order=order):
            stats = await _one_update(cast, cast.objective.weigh(mini), step)
            taken.append(stats)
            if stats["halted"]:
                return _over_updates(taken)
    return _over_updates(taken)


async def _one_update(cast: Cast, mini: Batch, step: int) -> Stats:
    """One optimizer step of every trained model, or of none: a critic must not move on without its policy."""
    stats: Stats = {}
    prepared = []
    for role in sorted(cast.trained, key=lambda role: role is not Role.POLICY):
        prepared.append(cast.trained[role])
        stats |= await cast.trained[role].prepare(mini, step)
        if stats["skipped"] or stats["halted"]:
            break
    for actor in prepared:
        await actor.apply(not (stats["skipped"] or stats["halted"]))
    return stats


def _over_updates(taken: Sequence[Stats]) -> Stats:
    """Figures of a step from those of its updates: means, extremes where the name says so, and what only the first
    or the sum can tell: the gap between sampler and learner, and how many updates were taken or skipped."""
    names = {name: None for stats in taken for name in stats}
    merged: Stats = {}
    for name in names:
        values = [stats[name] for stats in taken if name in stats]
        if name.endswith("max"):
            merged[name] = max(values)
        elif name.endswith("min"):
            merged[name] = min(values)
        elif name in ("skipped", "halted"):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    if "kl/old" in taken[0]:
        merged["kl/sampler"] = taken[0]["kl/old"]
    return merged | {"updates": float(len(taken)) - merged["skipped"] - merged["halted"]}
