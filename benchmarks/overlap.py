"""What overlapping generation and learning gains, for any number of rollout workers: `python benchmarks/overlap.py`.

The loop's own source, slots, rollouter, pool and rollout workers run on a clock that jumps from event to event; engines
and the learner are replaced by the time that they would take. Lengths of answers are log-normal by default, or those of
a run's samples (`--samples runs/grpo/samples.jsonl`). Learning is as long as generating with everything busy, the case
in which overlap matters most; more workers take a larger batch, so that each has the same to do.

    lag 0    generate all, learn, generate all, ...: workers idle while one long answer ends, and while learning goes on
    lag n    the next n steps' prompts start meanwhile
    wait     rollout.interrupt=false: new weights wait for the answers under way, and no other begins meanwhile

Real runs say what they gain: `time/step` and `time/batch` of their metrics, with rollout.max_lag of 0, 1 and 2.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import KEPT, asked, show

from plaudit.algorithms.grpo import GRPO
from plaudit.data.cursor import Cursor
from plaudit.loop.online import OnlineSource
from plaudit.rollout.pool import Pool
from plaudit.rollout.rollouter import Rollouter
from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.worker import WorkerLost
from plaudit.settings.tree import Settings
from plaudit.types import Completion, Finish, Prompt, Sampling, Score
from plaudit.weights.packed import pack
from plaudit.weights.transport import Stored

TOKEN_SECONDS = 0.03
"""A decoding step; all that is simulated is proportional to it."""
LEAST_TOKENS = 12
"""Of an answer, on average: longer ones are simulated in tokens that stand for several."""
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


class Timed:
    """An engine of `SLOTS` sequences; one takes its length in decoding steps."""

    busy = False

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.room, self.begins = lengths, asyncio.Semaphore(SLOTS), asyncio.Event()
        self.chunk = max(1, int(mean(lengths) / LEAST_TOKENS))
        self.loads: list[tuple[float, int]] = []
        self.under_way, self.ended = 0, asyncio.Event()
        self.busy_seconds = 0.0

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(sampling) for sampling in plan)))

    async def _one(self, sampling: Sampling) -> Completion:
        length = random.Random(sampling.seed).choice(self.lengths)
        async with self.room:
            await self.begins.wait()
            self.under_way += 1
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(length * TOKEN_SECONDS)
            self.busy_seconds += length * TOKEN_SECONDS
            self.under_way -= 1
            self.ended.set()
        count = -(-length // self.chunk)
        zeros, versions = (0.0,) * count, self._versions(began, count)
        return Completion(tokens=(1,) * count, logprobs=zeros, versions=versions, text="", finish=Finish.EOS)

    def _versions(self, began: float, count: int) -> tuple[int, ...]:
        """Of each token of a sequence that ends now."""
        seconds = TOKEN_SECONDS * self.chunk
        places = [max(0, min(count, round((when - began) / seconds))) for when, _ in self.loads] + [count]
        runs = zip(self.loads, places, places[1:], strict=False)
        return tuple(version for (_, version), first, behind in runs for _ in range(behind - first))

    async def drain(self) -> None:
        self.begins.clear()
        while self.under_way:
            self.ended.clear()
            await self.ended.wait()

    def load(self, weights: Mapping[str, torch.Tensor] | None, version: int) -> None:
        self.loads = [*self.loads[-8:], (asyncio.get_running_loop().time(), version)]
        self.begins.set()

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Here:
    """A rollout worker without a process of its own, as the pool calls it."""

    def __init__(self, number: int, worker: RolloutWorker):
        self.name, self.worker = f"worker {number}", worker
        self.processes = (self,)

    async def call(self, method: Any, *arguments: Any) -> Any:
        return await getattr(self.worker, method.__name__)(*arguments)

    async def gone(self) -> WorkerLost:
        """Never."""
        return await asyncio.get_running_loop().create_future()

    def kill(self, reason: str = "was ended") -> None: ...


class Varied:
    """A reward without a model, different for each sample."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return [Score(value=float(number)) for number in range(len(completions))]


@dataclass(frozen=True)
class Case:
    workers: int
    lag: int
    interrupt: bool
    lengths: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """A step's, on average."""
    busy: float
    """Share of the workers' slots that decoded."""
    age: float
    """Versions that a token was old, on average."""


async def simulate(case: Case) -> Outcome:
    engines: list[Timed] = []

    async def start(number: int) -> Here:
        engines.append(Timed(case.lengths))
        return Here(number, RolloutWorker(engines[-1], interrupt=case.interrupt))

    async def publish(version: int) -> None:
        packed = pack({"weight": torch.zeros(1)}, version)
        await pool.publish(Stored((packed,), version, packed.digest))

    def busy_seconds() -> float:
        return sum(engine.busy_seconds for engine in engines)

    pool = Pool(start, case.workers, patience=60.0, failures=lambda lost: None)
    await pool.open()
    await publish(0)
    method, cursor = GRPO(samples=SAMPLES), Cursor(1, seed=0)
    rollouter = Rollouter(pool, Varied(), Settings().shaping, method.plan(Sampling()), seed=0)
    per_step = case.workers * SLOTS // SAMPLES
    prompts = [Prompt(id="p", text="", tokens=(1,))]
    source = OnlineSource(prompts, cursor, rollouter, method, prompts_per_step=per_step, max_lag=case.lag)
    learning = mean(case.lengths) * TOKEN_SECONDS
    loop = asyncio.get_running_loop()
    ages, began, busy = list[float](), 0.0, 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            began, busy = loop.time(), busy_seconds()
        delivery = await source.next()
        if step >= WARM:
            ages.append(delivery_age(delivery.batch, step))
        await asyncio.sleep(learning)
        await publish(step + 1)
        await source.done(delivery)
    seconds = loop.time() - began
    await source.close()
    pool.close()
    await asyncio.sleep(0)  # so that its tasks end
    share = (busy_seconds() - busy) / (seconds * case.workers * SLOTS)
    return Outcome(seconds / STEPS, share, sum(ages) / len(ages))


def delivery_age(batch: Any, step: int) -> float:
    versions = batch.version[batch.version >= 0]
    return float((step - versions).float().mean())


def mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / len(lengths)


def run(case: Case) -> Outcome:
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(simulate(case))
    finally:
        loop.close()


def read_lengths(path: Path) -> list[int]:
    if not path.name:
        generator = random.Random(0)
        return [max(8, min(2048, round(generator.lognormvariate(5.0, 0.9)))) for _ in range(5000)]
    return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]


def outcomes(options: Any, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    for workers in options.workers:
        first: float | None = None
        for lag in options.lags:
            for interrupt in (True, False) if lag else (True,):
                found = run(Case(workers, lag, interrupt, lengths))
                first = first or found.seconds
                way = "" if not lag else "interrupt" if interrupt else "wait"
                about = {"workers": workers, "lag": lag, "new weights": way, "s a step": f"{found.seconds:.1f}"}
                gains = {"gain": f"{first / found.seconds:.2f}x", "slots busy": f"{found.busy:.0%}"}
                yield about | gains | {"mean age": f"{found.age:.2f}"}


def main() -> None:
    samples = Path(), "a run's samples.jsonl, for the lengths of its answers"
    options = asked(__doc__, workers=[8, 32, 128, 512], lags=[0, 1, 2, 4], samples=samples, json=KEPT)
    lengths = read_lengths(options.samples)
    title = f"{SLOTS} slots a worker, mean length {mean(lengths):.0f}, longest {max(lengths)}"
    show(outcomes(options, lengths), title=title, kept=options.json)


if __name__ == "__main__":
    main()
