"""Ends real processes of a run at chosen moments, and notes when that was found and when the run went on.

A moment is a call that the driver has just sent: the process is killed while the call is under way.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from assent.loop.progress import Moment
from assent.runtime.ray import RayWorker
from assent.types import Stats

PHASES: dict[str, Callable[[str, tuple[Any, ...]], bool]] = {
    "rollout": lambda method, arguments: method == "generate",
    "reference": lambda method, arguments: method == "do" and arguments[1] == "annotate",
    "update": lambda method, arguments: method == "do" and arguments[1] == "prepare",
    "apply": lambda method, arguments: method == "do" and arguments[1] == "apply",
    "publish": lambda method, arguments: method == "load",
    "save": lambda method, arguments: method == "save",
}
ROLES = {"rank": "training rank", "rollout": "rollout worker"}


@dataclass
class Kill:
    """SIGKILL (or SIGSTOP) of a process of `role` at the next call of `phase`, once the run has done `step` steps."""

    role: str
    phase: str
    step: int
    signal: int = signal.SIGKILL
    at: float | None = None
    found: float | None = None
    """Seconds until the driver knew."""
    next_step: float | None = None
    """Seconds until the run had done a further step."""
    reached: int = 0
    """Steps done when it was killed."""


def seeded(seed: int, count: int, steps: int) -> list[Kill]:
    """Kills at random moments of a run, at most one a step and role."""
    generator = random.Random(seed)
    moments = [(role, phase) for role in ROLES for phase in PHASES]
    return [Kill(*generator.choice(moments), step=1 + number * (steps - 2) // count) for number in range(count)]


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

    async def hook(self, moment: Moment) -> Stats:
        self.steps = moment.progress.step
        kill = self.current
        if kill is not None and kill.at is not None and moment.progress.step > kill.reached:
            kill.next_step = time.monotonic() - kill.at
        return {}

    def sent(self, method: str, arguments: tuple[Any, ...]) -> None:
        kill = self.current
        if kill is None or kill.at is not None or self.steps < kill.step:
            return
        if PHASES[kill.phase](method, arguments):
            victims = [w for w in self.workers if w.name.startswith(ROLES[kill.role]) and alive(w)]
            if victims:
                os.kill(victims[0].pid, kill.signal)
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
        lines = ["role     phase      after step  found, s  next step, s"]
        for kill in self.kills:
            figures = (f"{x:.1f}" if x is not None else "-" for x in (kill.found, kill.next_step))
            lines.append("{:8} {:10} {:10} {:>9} {:>13}".format(kill.role, kill.phase, kill.reached, *figures))
        return "\n".join(lines)


def alive(worker: RayWorker) -> bool:
    return not worker._lost.done()
