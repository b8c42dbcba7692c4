"""Ends real processes of a run at chosen moments, and notes when that was found and when the run went on.

    seeded kills -> Killer (a hook; sees every call that the driver sends) -> table

A moment is a call that the driver has just sent: the process is killed (or frozen) while the call is under way.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assent.runtime.settings import RuntimeSettings
from assent.runtime.token import prepare

prepare(RuntimeSettings(kind="ray"))  # before ray is imported, which reads its environment then
from assent.loop.progress import Moment  # noqa: E402
from assent.runtime.ray import RayWorker  # noqa: E402
from assent.types import Stats  # noqa: E402

PHASES: dict[str, Callable[[str, tuple[Any, ...]], bool]] = {
    "rollout": lambda method, arguments: method == "generate",
    "update": lambda method, arguments: method == "do" and arguments[1] == "prepare",
    "apply": lambda method, arguments: method == "do" and arguments[1] == "apply",
    "publish": lambda method, arguments: method == "load",
    "save": lambda method, arguments: method == "save",
}
ROLES = {"rank": "training rank", "rollout": "rollout worker"}
SIGNALS = {signal.SIGKILL: "killed", signal.SIGSTOP: "frozen"}


LONGEST = 60.0
"""Seconds in which a kill must be found."""


@dataclass
class Kill:
    """SIGKILL (or SIGSTOP) of a process of `role` at the next call of `phase`, once the run has done `step` steps."""

    role: str
    phase: str
    step: int
    signal: signal.Signals = signal.SIGKILL
    which: int = 0
    """Of several of the role, counted round and round."""
    at: float | None = None
    found: float | None = None
    """Seconds until the driver knew."""
    next_step: float | None = None
    """Seconds until the run had done a further step."""
    reached: int = 0
    """Steps done when it was killed."""
    repeated: int = 0
    """Steps that had to be done again."""
    equal: bool | None = None
    """The run that it happened to ended with the weights of an undisturbed one, to the bit."""

    def row(self) -> str:
        figures = (f"{x:.1f}" if x is not None else "-" for x in (self.found, self.next_step))
        state = {None: "-", True: "yes", False: "NO"}[self.equal]
        return "{:8} {:8} {:7} {:10} {:>9} {:>13} {:>11} {:>6}".format(
            self.role, self.phase, SIGNALS[self.signal], self.reached, *figures, self.repeated, state
        )


HEADER = "role     phase    what    after step  found, s  next step, s  steps again  equal"


def seeded(seed: int, count: int, *, first: int = 1, frozen: float = 0.1) -> list[Kill]:
    """Kills at random moments of a run, one a step; a share of them `frozen` instead."""
    generator = random.Random(seed)
    moments = [(role, phase) for role in ROLES for phase in PHASES]
    return [
        Kill(
            *generator.choice(moments),
            step=first + number,
            signal=signal.SIGSTOP if generator.random() < frozen else signal.SIGKILL,
            which=generator.randrange(4),
        )
        for number in range(count)
    ]


@dataclass
class Killer:
    """Carries out kills in their order, one after the other was survived. Add `hook` to the run's hooks."""

    kills: Sequence[Kill]
    steps: int = 0
    """Steps done."""
    workers: list[RayWorker] = field(default_factory=list)

    @property
    def current(self) -> Kill | None:
        return next((kill for kill in self.kills if kill.next_step is None), None)

    @property
    def survived(self) -> bool:
        return all(kill.found is not None and kill.next_step is not None for kill in self.kills)

    async def hook(self, moment: Moment) -> Stats:
        step, before = moment.progress.step, self.steps
        self.steps = step
        kill = self.current
        if kill is None or kill.at is None:
            return {}
        if step <= before:
            kill.repeated = before + 1 - step
        if step > kill.reached:
            seconds = time.monotonic() - kill.at
            while kill.found is None and time.monotonic() < kill.at + LONGEST:  # the run got on without it
                await asyncio.sleep(0.05)
            kill.next_step = seconds
        return {}

    def sent(self, method: str, arguments: tuple[Any, ...]) -> None:
        kill = self.current
        if kill is None or kill.at is not None or self.steps < kill.step or not PHASES[kill.phase](method, arguments):
            return
        of_role = (w for w in self.workers if w.name.startswith(ROLES[kill.role]) and alive(w))
        if victims := sorted(of_role, key=lambda worker: worker.name):
            os.kill(victims[kill.which % len(victims)].pid, kill.signal)
            kill.at, kill.reached = time.monotonic(), self.steps

    def lost(self) -> None:
        kill = self.current
        if kill is not None and kill.at is not None and kill.found is None:
            kill.found = time.monotonic() - kill.at

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Every call of the driver passes by here."""
        start, call, end = RayWorker.start, RayWorker.call, RayWorker._end
        killer = self

        async def started(worker: RayWorker, timeout: float) -> None:
            await start(worker, timeout)
            killer.workers.append(worker)

        async def called(worker: RayWorker, method: str, *arguments: Any) -> Any:
            answer = call(worker, method, *arguments)
            killer.sent(method, arguments)
            return await answer

        def ended(worker: RayWorker, reason: str) -> None:
            if reason != "was ended":
                killer.lost()
            end(worker, reason)

        RayWorker.start, RayWorker.call, RayWorker._end = started, called, ended  # type: ignore[method-assign]
        try:
            yield
        finally:
            RayWorker.start, RayWorker.call, RayWorker._end = start, call, end  # type: ignore[method-assign]

    def table(self) -> str:
        return "\n".join([HEADER, *(kill.row() for kill in self.kills)])


def varied(tokens: tuple[int, ...]) -> float:
    """A reward from -1 to 1, by no reason that a model could learn in a few steps."""
    return sum(tokens) % 11 / 5 - 1


def alive(worker: RayWorker) -> bool:
    return not worker._lost.done()


def descendants(pid: int) -> set[int]:
    """Processes that this one started, and those started by them."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found, more = set[int](), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def running(pids: set[int]) -> set[int]:
    """Those that have not ended."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return {pid for pid in pids if runs(pid)}
