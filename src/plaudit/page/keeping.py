"""Keep a run's page up to date: after a step, but at most every few seconds, and when the run ends.

executor -> every process, the version it samples with, lost workers -> page/run_page.py -> page.html
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plaudit.executors.base import Executor
from plaudit.loop.progress import Moment
from plaudit.monitor.sinks import read_jsonl
from plaudit.page.run_page import Curves, closed, page
from plaudit.support.paths import write_whole
from plaudit.types import Stats

EVERY = 2.0
"""Seconds between two writes: a browser asks every three."""


class ShowPage:
    """A hook that rewrites the run's page. `metrics`: the file with the figures of steps before a resume."""

    def __init__(self, path: Path, executor: Executor, *, title: str, steps: int, metrics: Path):
        self.path, self.executor, self.title, self.steps = path, executor, title, steps
        self._curves = Curves(read_jsonl(metrics) if metrics.exists() else ())
        self._written, self._paused = -EVERY, ""

    async def __call__(self, moment: Moment) -> Stats:
        self._curves.add({"step": moment.progress.step, "time": moment.progress.seconds} | moment.stats)
        stopped = moment.stopping and not moment.failed  # an error is shown by `last_page`
        ended = "done" if moment.last else "stopped" if stopped else ""
        self._paused = ""
        if moment.last or moment.stopping or time.monotonic() - self._written >= EVERY:
            self._written = time.monotonic()
            self.write_whole(ended)
        return {}

    def paused(self, why: str) -> None:
        """Show what the current step waits for; "" means that it continues."""
        self._paused = why
        self.write_whole("")

    def write_whole(self, ended: str) -> None:
        now = self.executor.processes()
        text = page(self.title, curves=self._curves, steps=self.steps, processes=now, ended=ended, paused=self._paused)
        write_whole(self.path, text)


@contextmanager
def last_page(path: Path) -> Iterator[None]:
    """If the block raises, show the error on the page, if the page exists, and raise it again."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            write_whole(path, closed(path.read_text(encoding="utf-8"), str(error) or type(error).__name__))
        raise
