"""What thousands of workers cost the driver: `python benchmarks/driver.py`.

    choice      one request to the least busy worker, and its end       microseconds
    heartbeats  real calls of Ray, four in runtime.heartbeat_timeout    share of one core of the driver
    samples     GRPO's groups from workers through rows, batch and      tokens a second of one core of the driver
                credit to 8 ranks, all by real calls of Ray, and the
                step's record of answers (log.samples_megabytes)

The workers are made up, but for one process that answers for all, so that messages are real. Nodes have 8 workers; a
line `each asked` puts each worker on a node of its own, as if nobody could vouch for another. Needs ray.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import KEPT, asked, show

from plaudit.algorithms.base import Output
from plaudit.algorithms.grpo import GRPO
from plaudit.batch import Batch
from plaudit.data.cursor import Cursor
from plaudit.executors.pinned import Pins, pinned
from plaudit.learn import scorer  # noqa: F401 - it says how a batch travels, as in runs
from plaudit.learn.watched import Watched, WatchedRows
from plaudit.loop.progress import Moment, Progress
from plaudit.loop.redraw import LastingSource
from plaudit.loop.samples import recording
from plaudit.rollout.pool import Pool
from plaudit.rollout.queued import Draft, QueuedEngine
from plaudit.rollout.rollouter import Rollouter, ShapingSettings
from plaudit.runtime.hearts import Hearts
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.plain import dumps
from plaudit.runtime.ray import RayRuntime
from plaudit.runtime.ray_worker import RayWorker
from plaudit.runtime.ray_worker_group import RayWorkerGroup
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.supervisor import Supervisor
from plaudit.types import Completion, Finish, Prompt, Sampling, Score
from plaudit.types.distant import LARGE, apart

A_NODE = 8
STEPS = 40
"""Timed ones: enough that the longest answers are recorded too, one group in about twenty steps."""
RUN, RECORD = 1000, 200_000_000
"""Steps of a run and bytes of its record of answers, as by default (log.samples_megabytes)."""
WIDTH = 16
"""Requests that each worker has at a time."""


async def choice(count: int, requests: int) -> float:
    """Microseconds of the driver for each request, while each worker has some."""

    async def start(number: int) -> Any:
        gone = asyncio.get_running_loop().create_future()
        return SimpleNamespace(name=f"worker {number}", gone=lambda: gone, kill=lambda reason="": None)

    places = Supervisor[Any](start, count, work="requests", patience=60.0, none="none", failures=lambda lost: None)
    places.open()
    await places.counted()
    asked = 0

    async def ask(worker: Any) -> None:
        await asyncio.sleep(0)

    async def one() -> None:
        nonlocal asked
        while asked < requests:
            asked += 1
            await places.asked(64 + asked % 192, ask)

    begun = time.process_time()
    await asyncio.gather(*(one() for _ in range(min(requests, WIDTH * count))))
    taken = time.process_time() - begun
    places.close("the pool was")
    return 1e6 * taken / requests


async def heartbeats(runtime: RayRuntime, count: int, a_node: int, seconds: float) -> float:
    """Share of a core that the driver spends."""
    settings = runtime.settings
    group = runtime.reserve([{"CPU": 1.0}])
    await runtime.placed(group, within=60.0)
    real = await runtime.spawn(dict, name="answers for all", group=group, place=0, threads=1)
    hearts = Hearts()
    for number in range(count):
        worker = RayWorker[Any](f"worker {number}", real._actor, settings)
        worker.pid, worker.node = real.pid, f"node {number // a_node}"
        hearts.add(worker)
    await asyncio.sleep(settings.heartbeat_timeout / 4)  # all begin at once
    begun, clock = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (time.process_time() - begun) / (time.perf_counter() - clock)
    hearts.close()
    runtime.end_workers()
    return share


class Answers:
    """A rollout worker that has sampled before it is asked."""

    def __init__(self, length: int, count: int):
        self.engine: Any = Sampled(length)
        self.found = [self.engine.answered(number) for number in range(count)]

    async def generate(self, attempt: int, prompt_tokens: Any, plan: Sequence[Sampling]) -> list[Completion]:
        return self.found[: len(plan)]

    async def generate_apart(self, attempt: int, prompt_tokens: Any, plan: Any, least: int) -> Any:
        columns, told = apart(self.found[: len(plan)], least)
        return columns, dumps(told)


class Sampled(QueuedEngine):
    """Makes answers as engines do, without steps."""

    def __init__(self, length: int):
        super().__init__(self, slots=1, max_length=2 * length, ends=())
        self.length = length
        self._queue: Any = SimpleNamespace(answer=lambda draft, completion: setattr(self, "last", completion))

    def answered(self, seed: int) -> Completion:
        chance = random.Random(seed)
        draft = Draft([1], Sampling(), self.length)
        draft.tokens = [chance.randrange(150_000) for _ in range(self.length)]
        draft.logprobs = torch.rand(self.length).neg().tolist()
        self._answer(draft, Finish.EOS, "four letters a token"[:4] * self.length)
        return self.last  # type: ignore[attr-defined, no-any-return]

    def decode(self, token_ids: Any, **named: Any) -> str:
        return ""

    _advance = _forget = _withdraw = load = lambda self, *given, **named: None  # type: ignore[assignment]


class Learns(Watched, Pins):
    """A rank that has learned as soon as it is asked, and keeps what it saw."""

    def prepare(self, batch: Batch) -> float:
        batch = batch.landed()
        output = Output(logprobs=batch.behaviour, entropy=batch.behaviour)
        total, _ = self.watching(lambda output, batch: (torch.tensor(len(batch.tokens)), {}))(output, batch)
        return float(total)


class Chance:
    """A reward that costs nothing."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return [Score(value=random.random()) for _ in completions]


async def samples(
    runtime: RayRuntime, workers: int, length: int, prompts: int, steps: int, stay: int | None
) -> tuple[float, float]:
    """Tokens a second of the driver's CPU time, and of the clock. `stay` is as in `Pool`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as runs do
    group = runtime.reserve([{"CPU": 0.5}] * 2)
    await runtime.placed(group, within=60.0)
    grpo = GRPO()
    real = await runtime.spawn(Answers, length, grpo.samples, name="samples", group=group, place=0, threads=1)
    rank = await runtime.spawn(Learns, name="learns", group=group, place=1, threads=1)

    async def start(number: int) -> Any:
        return RayWorker[Any](f"worker {number}", real._actor, runtime.settings)

    pool = Pool(start, workers, patience=60.0, failures=lambda lost: None, stay=stay)
    await pool.open()
    rollouter = Rollouter(pool, Chance(), ShapingSettings(), grpo.plan(Sampling(max_tokens=length)), seed=0)
    items = [Prompt(id=f"{n}", text="", tokens=tuple(range(n, n + 200))) for n in range(1000)]
    cursor = Cursor(len(items))
    ranks = RayWorkerGroup[Learns]([rank] * 8)
    given = items, cursor, rollouter, grpo
    lost = partial(pinned, [rank])  # they are on one node
    source = LastingSource(*given, prompts_per_step=prompts, max_lag=1, lost=lost, say=print)
    taken, tokens, clock = 0.0, 0, 0.0

    async def seen(wanted: Sequence[int]) -> list[WatchedRows]:
        return [one for found in await ranks.each(Learns.taken, wanted) for one in found]

    with (
        tempfile.TemporaryDirectory() as folder,
        recording(Path(folder, "a"), lambda ids: "four" * len(ids), seen, budget=RECORD, steps=RUN, after=0) as record,
    ):
        for step in range(steps + 1):
            if step == 1:
                taken, clock = time.process_time(), time.perf_counter()
            delivery = await source.next()
            assert delivery.batch is not None
            batch, _ = grpo.credit(delivery.batch, {})
            await ranks.split(Learns.prepare, grpo.weigh(batch.trained()))
            await source.done(delivery)
            progress = Progress(step=1 + step)
            await record(Moment(progress=progress, delivery=delivery, batch=batch, stats={}, last=False))
            tokens += (step > 0) * sum(len(answer.tokens) for one in delivery.groups for answer in one.responses)
        taken, clock = time.process_time() - taken, time.perf_counter() - clock
    await source.close()
    pool.close()
    runtime.end_workers()
    return tokens / taken, tokens / clock


def main() -> None:
    options = asked(
        __doc__,
        sizes=[64, 512, 4096],
        seconds=(20.0, "of heartbeats that are counted"),
        requests=100_000,
        lengths=([100, 1000, 8000], "tokens of an answer"),
        only=["samples", "choice"],
        json=KEPT,
    )
    asyncio.run(measured(options))


async def measured(options: Any) -> None:
    runtime = RayRuntime(RuntimeSettings(kind="ray"))
    runtime.start()
    other = options.json.with_suffix(".choice.json") if options.json.name else None
    try:
        if "samples" in options.only:
            show(
                [row async for row in of_samples(runtime, options)], title="samples, tokens a second", kept=options.json
            )
        if "choice" in options.only:
            show([row async for row in of_choice(runtime, options)], title="choice and heartbeats", kept=other)
    finally:
        runtime.close()


async def of_samples(runtime: RayRuntime, options: Any) -> AsyncIterator[dict[str, Any]]:
    ways = {"through the driver": None, "stay if large": LARGE}
    for length, count, (way, stay) in itertools.product(options.lengths, options.sizes, ways.items()):
        prompts = max(16, 64_000 // length)
        fast, clock = await samples(runtime, count, length, prompts=prompts, steps=STEPS, stay=stay)
        about = {"tokens of an answer": f"{length:,}", "workers": f"{count:,}", "numbers": way}
        yield about | {"of CPU": f"{fast:,.0f}", "of the clock": f"{clock:,.0f}"}


async def of_choice(runtime: RayRuntime, options: Any) -> AsyncIterator[dict[str, Any]]:
    for count in options.sizes:
        row = {"workers": f"{count:,}", "choice, us a request": f"{await choice(count, options.requests):.1f}"}
        for title, a_node in (("heartbeats, each asked", 1), (f"heartbeats, {A_NODE} a node", A_NODE)):
            row[title] = f"{await heartbeats(runtime, count, a_node, options.seconds):.1%}"
        yield row


if __name__ == "__main__":
    main()
