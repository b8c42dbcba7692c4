"""Kills workers of a run at a chosen call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from faults import APART, WORKERS, Killer

from plaudit.loop.progress import Moment
from plaudit.types import Stats


class At(Killer):
    """Kills a worker of each of these roles at the first call whose method `when` is true of."""

    def __init__(self, roles: Sequence[str], when: Callable[[Killer, str], bool]):
        super().__init__([])
        self.roles, self.when = roles, when
        self.hit: list[str] = []

    def sent(self, part: str | None, method: str) -> None:
        if not self.hit and self.when(self, method):
            for role in self.roles:
                victim = next(one for one in self.workers if one.name.startswith((WORKERS | APART)[role]) and one.alive)
                self.hit.append(victim.name)
                os.kill(victim.pid, signal.SIGKILL)

    async def hook(self, moment: Moment) -> Stats:
        self.steps = moment.progress.step
        return {}
