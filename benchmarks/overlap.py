"""What overlapping generation and learning gains, for any number of rollout workers: `python benchmarks/overlap.py`.

The loop's own source, slots and rollouter run on a clock that jumps from event to event; the engine and the learner are
replaced by the time that they would take. Lengths of answers are log-normal by default, or those of a run's samples
(`--samples runs/grpo/samples.jsonl`). Learning is as long as generating with everything busy, the case in which overlap
matters most; more workers take a larger batch, so that each has the same to do.

    lag 0    generate all, learn, generate all, ...: workers idle while one long answer ends, and while learning goes on
    lag n    the next n steps' prompts start meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from assent.algorithms.grpo import GRPO
from assent.data.cursor import Cursor
from assent.loop.online import OnlineSource
from assent.rewards.settings import ShapingSettings
from assent.rollout.rollouter import Rollouter
from assent.types import Completion, Finish, Prompt, Sampling, Score

TOKEN_SECONDS = 0.03
"""A decoding step; all that is simulated is proportional to it."""
SLOTS = 32
SAMPLES = 8
STEPS = 12
WARM = 4


class Clock(selectors.SelectSelector):
    """Where an event loop would wait, time jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@dataclass
class Workers:
    """An engine of so many workers with `SLOTS` sequences each; a sequence takes its length in decoding steps."""

    count: int
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        self.room = asyncio.Semaphore(self.count * SLOTS)
        self.version = 0
        self.busy_seconds = 0.0

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(sampling) for sampling in plan)))

    async def _one(self, sampling: Sampling) -> Completion:
        length = random.Random(sampling.seed).choice(self.lengths)
        async with self.room:
            began = self.version
            await asyncio.sleep(length * TOKEN_SECONDS)
            self.busy_seconds += length * TOKEN_SECONDS
        versions = (began,) * (length - 1) + (self.version,)
        zeros = (0.0,) * length
        return Completion(tokens=(1,) * length, logprobs=zeros, versions=versions, text="", finish=Finish.EOS)


class Varied:
    """A reward without a model, different for each sample."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return [Score(value=float(number)) for number in range(len(completions))]


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """A step's, on average."""
    busy: float
    """Share of the workers' slots that decoded."""
    age: float
    """Versions that a token was old, on average."""


async def simulate(workers: int, lag: int, lengths: Sequence[int]) -> Outcome:
    engine = Workers(workers, lengths)
    prompts = [Prompt(id="p", text="", tokens=(1,))]
    per_step = workers * SLOTS // SAMPLES
    method = GRPO(samples=SAMPLES)
    rollouter = Rollouter(engine, Varied(), ShapingSettings(), method.plan(Sampling()), seed=0)  # type: ignore[arg-type]
    cursor = Cursor(1, seed=0)
    source = OnlineSource(prompts, cursor, rollouter, method, prompts_per_step=per_step, max_lag=lag)
    learning = sum(lengths) / len(lengths) * TOKEN_SECONDS
    loop = asyncio.get_running_loop()
    ages, start, busy = list[float](), 0.0, 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            start, busy = loop.time(), engine.busy_seconds
        delivery = await source.next()
        if step >= WARM:
            rollouts = [r.completion.versions for group in delivery.groups for r in group.responses]
            ages.append(sum(sum(step - v for v in versions) / len(versions) for versions in rollouts) / len(rollouts))
        await asyncio.sleep(learning)
        engine.version = step + 1
        await source.done(delivery)
    seconds = loop.time() - start
    await source.close()
    share = (engine.busy_seconds - busy) / (seconds * workers * SLOTS)
    return Outcome(seconds / STEPS, share, sum(ages) / len(ages))


def run(workers: int, lag: int, lengths: Sequence[int]) -> Outcome:
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(simulate(workers, lag, lengths))
    finally:
        loop.close()


def read_lengths(path: Path | None) -> list[int]:
    if path is None:
        generator = random.Random(0)
        return [max(8, min(2048, round(generator.lognormvariate(5.0, 0.9)))) for _ in range(5000)]
    return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--samples", type=Path, help="a run's samples.jsonl, for the lengths of its answers")
    options = parser.parse_args()
    lengths = read_lengths(options.samples)
    table = Table(
        title=f"{SLOTS} slots a worker, mean length {sum(lengths) / len(lengths):.0f}, longest {max(lengths)}"
    )
    for title in ("workers", "lag", "s a step", "gain", "slots busy", "mean age"):
        table.add_column(title, justify="right")
    for workers in options.workers:
        first: float | None = None
        for lag in options.lags:
            found = run(workers, lag, lengths)
            first = first or found.seconds
            gain, busy = f"{first / found.seconds:.2f}x", f"{found.busy:.0%}"
            table.add_row(str(workers), str(lag), f"{found.seconds:.1f}", gain, busy, f"{found.age:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
