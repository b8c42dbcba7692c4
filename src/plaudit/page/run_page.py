"""A run's page: a file that a browser reloads, with progress, curves, and the processes of the run.

    records of the steps -> Curves
    Curves, processes and their states -> page -> page.html

It needs no server and so opens no port. Left out: samples and other details of a step (`plaudit monitor --serve`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from plaudit.executors.base import ProcessStatus
from plaudit.monitor.figures import FIGURES
from plaudit.monitor.templates import rendered
from plaudit.support.visible import rounded, visible

SHOWN = {figure.name: figure.title for figure in FIGURES if figure.page}
"""{metric: title of its curve}, for metrics that get a curve if the run has them."""
POINTS = 160
"""Approximate limit of points per curve. A longer curve keeps the smallest and the largest value of every few steps."""
RECENT = 20
"""Number of latest steps for estimating the pace."""
WIDTH, HEIGHT = 320, 60
WEB = Path(__file__).parent / "web"
REFRESH = '<meta http-equiv="refresh" content="3">'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A metric over steps, as the template draws it: its latest value, and the points of its line."""

    name: str
    latest: str
    span: str = ""
    steps: str = ""
    points: str = ""
    single: bool = False


class Curves:
    """The curves of all steps so far. Their size depends on the number of metrics, not of steps."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        self.step = 0
        self._curves: dict[str, Curve] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._timed, self._in_steps, self._seconds = 0, 0.0, 0.0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the figures of the next step."""
        self.step = int(record["step"])
        for metric in SHOWN:
            if metric in record:
                self._curves.setdefault(metric, Curve()).add(self.step, record[metric])
        if (seconds := record.get("time/step")) is not None:
            self._recent.append(float(seconds))
            self._timed, self._in_steps = self._timed + 1, self._in_steps + float(seconds)
        self._seconds = float(record.get("time") or 0.0)

    def shown(self) -> list[Panel]:
        return [_panel(name, self._curves[metric]) for metric, name in SHOWN.items() if metric in self._curves]

    def remaining(self, steps: int) -> str:
        """Estimate the remaining time from the latest steps, and from the mean time between steps (evaluations and
        checkpoints)."""
        if not self._recent:
            return ""
        between = max(0.0, self._seconds - self._in_steps) / self._timed
        seconds = round((sum(self._recent) / len(self._recent) + between) * (steps - self.step))
        return f", about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} to go"


class Curve:
    """One metric over steps. It keeps the smallest and the largest value of each stretch of steps; stretches become
    longer as the curve grows."""

    def __init__(self) -> None:
        self.latest = math.nan
        self.first: Point | None = None
        self.last: Point | None = None
        self._stretches: list[tuple[Point, Point]] = []
        self._size, self._held = 1, 0
        """Number of values in a full stretch of the curve, and number of values in its last stretch so far."""

    def add(self, step: int, value: Any) -> None:
        self.latest = float(value) if isinstance(value, int | float) else math.nan
        if not math.isfinite(self.latest):
            return
        self.last = point = (self.latest, step)
        self.first = self.first or point
        if self._stretches and self._held < self._size:
            self._stretches[-1] = _joined(self._stretches[-1], (point, point))
            self._held += 1
            return
        if len(self._stretches) == POINTS // 2:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches, self._size = [_joined(one, other) for one, other in pairs], 2 * self._size
        self._stretches.append((point, point))
        self._held = 1

    def points(self) -> list[Point]:
        """Points (value, step) in the order of steps, with the first and the last one."""
        chosen = {point for stretch in self._stretches for point in stretch} | {self.first, self.last}
        return sorted((point for point in chosen if point is not None), key=lambda point: point[1])


Point = tuple[float, int]


def _joined(one: tuple[Point, Point], other: tuple[Point, Point]) -> tuple[Point, Point]:
    return min(one[0], other[0]), max(one[1], other[1])


def page(
    title: str, *, curves: Curves, steps: int, processes: Sequence[ProcessStatus], ended: str = "", paused: str = ""
) -> str:
    """Return the page as HTML. Without `ended` the browser reloads it every few seconds. `paused`: what the run waits
    for."""
    return rendered(
        WEB / "run.html.jinja",
        refresh="" if ended else Markup(REFRESH),
        title=title,
        step=curves.step,
        steps=steps,
        state=(ended and f", {ended}") or (paused and f", paused: {paused}") or curves.remaining(steps),
        as_of=Markup(_as_of()),
        panels=curves.shown(),
        width=WIDTH,
        height=HEIGHT,
        processes=processes,
    )


def closed(text: str, why: str) -> str:
    """Return the page's text with `why` the run ended, without remaining time and reload; unchanged if it has ended."""
    if REFRESH not in text:
        return text
    before, _, rest = text.replace(REFRESH, "", 1).partition("<p>")
    line, _, after = rest.partition("</p>")
    step = line.partition(" <small>")[0].partition(",")[0]
    return f"{before}<p>{step}, ended: {escape(visible(why))}{_as_of()}</p>{after}"


def _as_of() -> str:
    """Return the time of writing as HTML; after a killed run, only this shows on the page that the run has ended."""
    return f" <small>as of {time.strftime('%Y-%m-%d %H:%M:%S %Z')}</small>"


def _panel(name: str, curve: Curve) -> Panel:
    latest = _number(curve.latest) if math.isfinite(curve.latest) else "not finite"
    found = curve.points()
    if not found:
        return Panel(name=name, latest=latest)
    low, high = min(found)[0], max(found)[0]
    first, last = found[0][1], found[-1][1]
    points = " ".join(
        f"{_share(x, first, last) * WIDTH:.1f},{HEIGHT - 4 - _share(y, low, high) * (HEIGHT - 8):.1f}"
        for y, x in (found if len(found) > 1 else 2 * found)  # twice the same point is drawn as a dot
    )
    return Panel(
        name=name,
        latest=latest,
        span=f"{_number(low)} to {_number(high)}",
        steps=f"{first} to {last}",
        points=points,
        single=len(found) == 1,
    )


def _number(value: float) -> str:
    return rounded(value, ",.0f" if abs(value) >= 1e3 else ".4g")


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
