"""Keeps a run's page up to date: after a step, but at most every few seconds, and when the run ends.

crew -> stations (every process, the version it samples with, who was lost) -> monitor/page.py -> page.html
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plaudit.crew.base import Crew
from plaudit.crew.ray import RayCrew
from plaudit.loop.progress import Moment
from plaudit.monitor.page import Curves, Station, closed, page
from plaudit.monitor.sinks import read_jsonl
from plaudit.types import Stats

EVERY = 2.0
"""Seconds between two writes: a browser asks every three."""
LATEST = 5
"""Lost workers that are shown."""


class ShowPage:
    """A hook; it stands behind the one that records metrics, whose file of `metrics` has the earlier ones."""

    def __init__(self, path: Path, crew: Crew, *, title: str, steps: int, metrics: Path):
        self.path, self.crew, self.title, self.steps = path, crew, title, steps
        self._curves = Curves(read_jsonl(metrics) if metrics.exists() else ())
        self._written = -EVERY

    async def __call__(self, moment: Moment) -> Stats:
        self._curves.add({"step": moment.progress.step, "time": moment.progress.seconds} | moment.stats)
        ended = "done" if moment.last else "stopped" if moment.stopping else ""
        if ended or time.monotonic() - self._written >= EVERY:
            self._written = time.monotonic()
            self._write(ended)
        return {}

    def _write(self, ended: str) -> None:
        found = stations(self.crew)
        text = page(self.title, curves=self._curves, steps=self.steps, stations=found, ended=ended)
        _write(self.path, text)


@contextmanager
def last_page(path: Path) -> Iterator[None]:
    """What ends the run within it stands on its page too, which otherwise went on to promise the rest of it."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            _write(path, closed(path.read_text(encoding="utf-8"), str(error) or type(error).__name__))
        raise


def _write(path: Path, text: str) -> None:
    """Beside it first: a browser never finds half a page."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def stations(crew: Crew) -> list[Station]:
    """Every process of a run, and those that were lost last."""
    if not isinstance(crew, RayCrew):
        does = "learns" if crew.engine is None else "learns and samples"
        return [Station("this process", f"{socket.gethostname()}, process {os.getpid()}", does)]
    found, pool = [], crew.pool
    sampling = {} if pool is None else {worker.name: f"samples with version {pool.version}" for worker in pool.workers}
    for worker in crew.runtime.workers:
        state = sampling.get(worker.name, "starts" if worker.name.startswith("rollout") else "is ready")
        found.append(Station(worker.name, f"node {worker.node[:8]}, process {worker.pid}", state))
    for lost in crew.failures.lost[-LATEST:]:
        found.append(Station(lost.name, "", f"lost: {lost.reason}", lost=True))
    return found
