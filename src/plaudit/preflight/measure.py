"""`plaudit profile`: time a recipe's own models on made-up rows of several sizes; fit the cost of each kind of work.

    a run's parts (`Job`) -> executor in this process -> passes, decoding, rewards, on one thread and on all -> Profile

Everything is asked through the executor, as the loop asks it, so Python and copies between stages count. Sums between
ranks are measured by two processes (`meeting.py`), the way to rollout workers by the recipe's own executor on Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plaudit.executors.opening import Executors
from plaudit.preflight.machine import cores, memory_there
from plaudit.preflight.madeup import MadeUp, asked_of, shape_of
from plaudit.preflight.profile import Curve, Link, Profile
from plaudit.preflight.work import Amounts, amounts
from plaudit.runs.assemble import Job
from plaudit.settings.tree import Settings
from plaudit.types import Role

Say = Callable[[str], None]
Points = list[tuple[Sequence[float], float]]
"""Measurements: (amounts of work, the seconds that they took)."""
Work = Callable[[], Awaitable[Any]]
KEPT = 256
"""Most lengths of answers that a profile keeps."""
SECONDS = 3.0
"""Seconds after which no further size of a curve is measured; the first four sizes are always measured."""
TIMES = 5
USUAL = {"store": Link(0.02, 3e8)}
"""Assumed links for a recipe without Ray, which cannot be measured: publishing to workers on one machine."""
BUSY = 0.3
"""Load per core above which a profile notes that other programs were running."""
STOLEN, SPREAD = 0.05, 0.25
"""Share of the cores' time that other virtual machines took, and how much longer the median repeat of the same work
took than the fastest, above which a profile notes this."""


def alone(s: Settings) -> Settings:
    """Return settings of the same run in one process and without lag, which is profiled."""
    runtime = replace(s.runtime, kind="local", num_training_workers=1, mesh={}, placement={}, strategy="replicate")
    rollout = replace(s.rollout, max_lag=0, workers=1, record=False, replay=None)
    return replace(s, runtime=runtime, rollout=rollout, resume=None)


def measure(
    job: Job, say: Say, *, answers: Sequence[int] = (), on_ray: Settings | None = None, size: float = 0.0
) -> Profile:
    """Profile the machine for a run of `alone` settings. `answers`: lengths of recorded ones. `on_ray`: the recipe's
    settings if it uses Ray; `size` is then the bytes of the weights that it publishes."""
    threads, load, before = torch.get_num_threads(), os.getloadavg()[0] / cores(), ticks()
    measured = _Measured(job, say, threads)
    try:
        found = asyncio.run(measured.profile(answers))
    finally:
        torch.set_num_threads(threads)
    stolen, spread = stolen_share(before, ticks()), statistics.median(measured.spreads or [0.0])
    notes = [f"measured beside other programs, which kept {load:.1f} processes a core busy"] if load > BUSY else []
    notes += [f"measured while other machines took {stolen:.0%} of the cores' time"] if stolen > STOLEN else []
    busy = bool(notes)
    notes += [f"repeats of the same work took {spread:.0%} longer than the fastest"] if spread > SPREAD else []
    say("sums between two processes")
    met = meeting()
    links = {name: Link(*met[name]) for name in ("all_reduce", "all_gather")} | USUAL
    crowded = max(1.0, met["crowded"]) if threads > 1 else 1.0
    if on_ray is not None and on_ray.samples:
        say("weights to rollout workers on Ray")
        call, store, ray = asyncio.run(_published(job, on_ray, say, size))
        found, links = replace(found, call=call, memory={**found.memory, "ray": ray}), links | {"store": store}
    else:
        notes.append("calls to other processes: usual values, since the recipe does not use Ray")
    return replace(found, links=links, crowded=crowded, notes=(*notes, *found.notes), busy=busy)


def fitted(points: Points) -> tuple[float, ...]:
    """Fit coefficients (none below 0) of amounts to seconds by least squares of the relative errors; return them."""
    from scipy.optimize import nnls

    seconds = np.array([second for _, second in points])
    table = np.array([numbers for numbers, _ in points], dtype=float) / seconds[:, None]
    scale = np.maximum(np.abs(table).max(0), 1e-30)
    found, _ = nnls(table / scale, np.ones(len(seconds)))
    return tuple(float(value) for value in found / scale)


async def timed(
    work: Work, clock: Callable[[], float] = time.perf_counter, spreads: list[float] | None = None
) -> float:
    """Return the fewest seconds of several tries, since other programs can only add to them. If the first try, which
    also warms up, takes long, it is the only one. `spreads` is given how much longer the median of the others took."""
    seconds: list[float] = []
    while len(seconds) <= TIMES and sum(seconds) < SECONDS / 4:
        begun = clock()
        await work()
        seconds.append(clock() - begun)
    if spreads is not None and len(seconds) > 2:
        spreads.append(statistics.median(seconds[1:]) / min(seconds) - 1)
    return min(seconds)


def ticks() -> list[int]:
    """Return the time of all cores since the start, in ticks, by kind (proc(5), /proc/stat); [] if unknown."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except OSError:
        return []


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the share of time between two `ticks` that the cores were taken by other virtual machines (steal)."""
    taken = [late - early for early, late in zip(before, after, strict=True)]
    return taken[7] / max(1, sum(taken)) if len(taken) == 8 else 0.0


def resident(name: str = "VmRSS") -> float:
    """Return the bytes of memory that this process takes (VmHWM: the most it has taken); 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        return 0.0


@dataclass
class _Measured:
    job: Job
    say: Say
    threads: int
    spreads: list[float] = field(default_factory=list)

    async def profile(self, answers: Sequence[int]) -> Profile:
        self.settings, self.made = self.job.settings, MadeUp(self.job)
        self.gpu = gpu = torch.cuda.is_available() and self.settings.device != "cpu"
        online, before = self.made.online, resident()
        with Executors(self.settings, self.say) as executors:
            self.executor = await executors.open(self.job.plan())
            self.models, token = self.executor.models(), 0.0
            token = await self._token()
            ways: list[dict[str, tuple[float, ...]]] = []
            for threads in sorted({1, self.threads}, reverse=True):
                ways.insert(0, await self._all(threads))
            updates = {str(role): await self._update(role) for role in self.models.trained}
            rewards = await self._rewards() if online else {}
            peak = resident("VmHWM")
            executors.dismiss()
        made = {name: Curve(ways[0][name], ways[-1][name], self.threads) for name in ways[0]}
        return Profile(
            hardware=torch.cuda.get_device_name() if gpu else f"{processor()}, {cores()} cores",
            devices=torch.cuda.device_count() if gpu else cores(),
            gpu=gpu,
            capacity=memory_there(gpu=gpu),
            decode=made.pop("decode", Curve((0.0,) * 4, (0.0,) * 4)),
            passes=made,
            updates=updates,
            rewards=rewards,
            memory={"process": before, "token": token, "peak": peak},
            items=self.job.data.cursor(0).length,
            prompts=tuple(self._some([len(item.tokens) for item in self.made.items] if online else [])),
            answers=tuple(self._some(answers)),
            rows=() if online else tuple(shape_of(item) for item in self._some(self.made.items)),
            notes=() if answers or not online else ("no samples yet: answers count as rollout.max_tokens long",),
        )

    def _some(self, values: Any) -> list[Any]:
        return self.made.chance.sample(list(values), min(KEPT, len(values)))

    async def _all(self, threads: int) -> dict[str, tuple[float, ...]]:
        """Coefficients of every kind of pass, and of decoding."""
        torch.set_num_threads(threads)
        # The time of one thread's own work is that of a quiet machine, whatever else runs.
        self.clock = time.process_time if threads == 1 and not self.gpu else time.perf_counter
        found = {}
        for name, counted, work_of in (*self._passes(), *self._judges()):
            self.say(f"{name}, threads={threads}")
            points, begun = Points(), time.perf_counter()
            for groups in self.made.sizes():
                if len(points) >= 4 and time.perf_counter() - begun > SECONDS:
                    break
                if not points:  # what only a first pass does, such as compiling and taking memory, is no part of a size
                    await (await work_of(groups))()
                points.append((counted(groups).numbers, await timed(await work_of(groups), self.clock, self.spreads)))
            found[name] = fitted(points)
        if self.made.online:
            self.say(f"decoding, threads={threads}")
            found["decode"] = await self._decoding()
        return found

    def _passes(self) -> Iterator[tuple[str, Callable[[Any], Amounts], Callable[[Any], Awaitable[Work]]]]:
        """Yield (name, amounts, work) for each role's passes: functions that count groups, and make a timed pass."""
        learn = self.settings.learn
        for role, learners in self.models.trained.items():

            async def trains(groups: Any, learners: Any = learners) -> Work:
                ready = self.made.weighed(await self.models.annotate(self.made.batch(groups)))

                async def work() -> None:
                    await learners.prepare(ready, 0, 1.0)
                    await learners.apply(False)

                return work

            yield f"{role}/train", lambda groups: self.made.learned(groups).cut(learn.micro_tokens), trains
        scorers: dict[Role, Any] = {**self.models.trained}
        scorers |= {} if self.models.reference is None else {Role.REFERENCE: self.models.reference}
        for role, scorer in scorers.items():

            async def scores(groups: Any, scorer: Any = scorer) -> Work:
                batch = self.made.batch(groups)
                return lambda: scorer.annotate(batch)

            if self.made.online or role is Role.REFERENCE or self.job.objective.recompute_old:
                yield f"{role}/score", lambda groups: self.made.learned(groups).cut(learn.score_tokens), scores

    def _judges(self) -> Iterator[tuple[str, Callable[[Any], Amounts], Callable[[Any], Awaitable[Work]]]]:
        judges = {n: one for n, one in enumerate(self.settings.rewards) if one.kind == "judge" and self.made.online}
        most = self.settings.learn.score_tokens
        for number, reward in judges.items():
            judge = self.executor.judge(reward, self.job.tokenizer)

            async def scores(groups: Any, judge: Any = judge) -> Work:
                asked = [(one.prompt, [answer.completion for answer in one.responses]) for one in groups]
                return lambda: asyncio.gather(*(judge.score(*one) for one in asked))

            yield f"judge {number}/score", lambda groups: amounts([asked_of(one) for one in groups], most), scores

    async def _decoding(self) -> tuple[float, ...]:
        sampler = self.executor.sampler(lambda *_, **__: nullcontext())
        (middle, long), most = self.made.prompts(), self.settings.rollout.max_tokens
        slots, half, points = self.settings.rollout.slots, max(2, most // 2), Points()
        for prompt, answer, rows in (
            *((middle, most, 1), (middle, half, max(1, slots // 4)), (middle, most, slots)),
            *((long, max(2, most // 4), slots), (middle, half, max(1, slots // 2))),
        ):
            draw = replace(self.settings.rollout.draw(), min_tokens=answer, max_tokens=answer)

            def work(prompt: int = prompt, draw: Any = draw, rows: int = rows) -> Awaitable[Any]:
                return asyncio.gather(*(sampler.generate([1] * prompt, [replace(draw, seed=n)]) for n in range(rows)))

            if not points:
                await work()
            context = rows * (answer * prompt + answer * (answer - 1) / 2)
            amount = (answer, answer * rows, context, rows * prompt)
            points.append((amount, await timed(work, self.clock, self.spreads)))
        return fitted(points)

    async def _update(self, role: Role) -> float:
        learners, groups = self.models.trained[role], next(self.made.sizes())
        batch, seconds = self.made.weighed(await self.models.annotate(self.made.batch(groups))), []
        for _ in range(TIMES):
            await learners.prepare(batch, 0, 1e-6)
            begun = self.clock()
            await learners.apply(True)
            seconds.append(self.clock() - begun)
        return min(seconds)

    async def _token(self) -> float:
        """Return the bytes that a pass with gradients takes per token, from the difference of two passes."""
        peaks = []
        sizes = sorted(self.made.sizes(), key=lambda groups: self.made.learned(groups).tokens)
        for groups in (sizes[0], sizes[-1]):
            _, counted, work_of = next(iter(self._passes()))
            await (await work_of(groups))()
            peaks.append((counted(groups).tokens, resident("VmHWM")))
        (few, low), (many, high) = peaks
        return max(0.0, (high - low) / max(1.0, many - few))

    async def _rewards(self) -> dict[str, tuple[float, float]]:
        """Return {reward: (seconds of a step's calls, seconds per answer)} of rewards other than judges."""
        if all(settings.kind == "judge" for settings in self.settings.rewards):
            return {}
        sampler, draws = self.executor.sampler(lambda *_, **__: nullcontext()), self.made.draws()
        prompts = list(self.made.items[:4])
        answered = await asyncio.gather(*(sampler.generate(one.tokens, draws) for one in prompts))
        rewards: Any = self.job.reward(self.executor, lambda *_, **__: nullcontext())
        found = {}
        for (reward, _, name), settings in zip(rewards.rewards, self.settings.rewards, strict=True):
            points = Points()
            for count in (1, len(prompts)) if settings.kind != "judge" else ():

                def work(reward: Any = reward, count: int = count) -> Awaitable[Any]:
                    asked = zip(prompts[:count], answered[:count], strict=True)
                    return asyncio.gather(*(reward.score(prompt, done) for prompt, done in asked))

                points.append(((1.0, float(count * len(draws))), await timed(work)))
            if points:
                constant, each = fitted(points)
                found[name] = (constant, each)
        return found


def processor() -> str:
    """The processor's name in /proc/cpuinfo; "CPU" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "CPU"


def meeting() -> dict[str, Any]:
    """Time gloo collectives between two processes. `crowded` is the slowdown by work on another core."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("meeting.py"))]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def _published(job: Job, on_ray: Settings, say: Say, size: float) -> tuple[float, Link, float]:
    """Return (seconds of a call to a rank, link by which weights of `size` bytes are published, bytes that Ray adds to
    a process), measured with the recipe's own executor."""
    before = resident()
    with Executors(on_ray, say) as executors:
        executor = await executors.open(job.plan())
        ray = max(0.0, resident() - before)
        models = executor.models()
        call = await timed(lambda: models.watched_rows([]))
        seconds = await timed(lambda: executor.publish(1))  # the same version again is sent whole
        executors.dismiss()
    latency = min(seconds / 2, 3 * call)
    return call, Link(latency, size / max(seconds - latency, 1e-4)), ray
