"""A run's page: a file that a browser shows and renews by itself: how far it is, its curves, who works on it.

    records of the steps, stations (who works where, in which state) -> page -> page.html

It needs no server and so opens no port. Left out: samples, and every other way to look into one step.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = (
    ("loss/policy", "policy loss"),
    ("loss/judge", "judge loss"),
    ("loss/critic", "critic loss"),
    ("reward/mean", "reward"),
    ("reward/gold", "gold reward"),
    ("kl/reference", "KL to the reference"),
    ("entropy", "entropy"),
    ("length/mean", "answer length"),
    ("lag/mean", "versions that samples are old, mean"),
    ("lag/max", "versions that samples are old, most"),
    ("kl/sampler", "KL between sampler and learner"),
    ("gradient_norm/policy", "gradient norm"),
    ("tokens_per_second", "tokens per second"),
    ("time/step", "seconds per step"),
)
"""Metrics with a curve, where a run has them, and what they are called."""
POINTS = 160
"""Most points of a curve: more would be averaged by the eye."""
WIDTH, HEIGHT = 320, 60
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .15em 1.2em .15em 0; text-align: left; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(22em, 1fr)); gap: 1.2em; }
.curves b { float: right; font-weight: 600; } svg { width: 100%; height: 60px; background: #f6f7f9; }
polyline { fill: none; stroke: #1f6fb4; stroke-width: 1.5; } .lost { color: #a33; } small { color: #777; }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #ddd; } svg { background: #1e2329; } }
"""


@dataclass(frozen=True, slots=True)
class Station:
    """One process of a run, as people are told of it."""

    name: str
    place: str
    """Its node and process."""
    state: str
    lost: bool = False


def page(
    title: str, *, records: Sequence[Mapping[str, Any]], steps: int, stations: Sequence[Station], ended: str = ""
) -> str:
    """The whole page; without `ended` it asks the browser to load it again every few seconds."""
    refresh = "" if ended else '<meta http-equiv="refresh" content="3">'
    done = int(records[-1]["step"]) if records else 0
    curves = "".join(_curve(name, records, metric) for metric, name in SHOWN)
    rows = "".join(_row(station) for station in stations)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{refresh}
<meta name="viewport" content="width=device-width"><title>{_text(title)}: step {done} of {steps}</title>
<style>{STYLE}</style></head><body>
<h1>{_text(title)}</h1>
<p>Step {done} of {steps}{_text(ended and f", {ended}") or _remaining(records, steps)}</p>
<div class="curves">{curves}</div>
<h2>Who works</h2>
<table><tr><th>worker</th><th>where</th><th>state</th></tr>{rows}</table>
</body></html>
"""


def _remaining(records: Sequence[Mapping[str, Any]], steps: int) -> str:
    """By the latest steps, which may be quicker or slower than the first ones."""
    times = [float(record["time/step"]) for record in records[-20:] if record.get("time/step") is not None]
    if not times:
        return ""
    seconds = round(sum(times) / len(times) * (steps - int(records[-1]["step"])))
    return f", about {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} to go"


def _row(station: Station) -> str:
    lost = ' class="lost"' if station.lost else ""
    return (
        f"<tr{lost}><td>{_text(station.name)}</td><td>{_text(station.place)}</td><td>{_text(station.state)}</td></tr>"
    )


def _curve(name: str, records: Sequence[Mapping[str, Any]], metric: str) -> str:
    """A metric over steps, with its latest value; nothing for one that the run has not."""
    found = [(float(r["step"]), float(r[metric])) for r in records if isinstance(r.get(metric), int | float)]
    found = [point for point in found if math.isfinite(point[1])]
    if not found:
        return ""
    latest, found = found[-1][1], [*found[: -1 : math.ceil(len(found) / POINTS)], found[-1]]
    low, high = min(y for _, y in found), max(y for _, y in found)
    first, last = found[0][0], found[-1][0]
    points = " ".join(
        f"{_share(x, first, last) * WIDTH:.1f},{HEIGHT - 4 - _share(y, low, high) * (HEIGHT - 8):.1f}" for x, y in found
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"><polyline points="{points}"/></svg>'
    return f"<div>{_text(name)} <b>{latest:.4g}</b>{svg}<small>{low:.4g} to {high:.4g}</small></div>"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _text(given: str) -> str:
    return html.escape(given)
