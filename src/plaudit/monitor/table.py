"""A table of runs: each one's state, the settings in which they differ, the last and best values of a few figures.

settings.yaml, metrics.jsonl, evaluations.jsonl of each run -> a row

Of a run's figures only these few are kept, so that a folder of 500 runs fits. Left out: choosing and sorting, which the
browser does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from plaudit.monitor.figures import FIGURES
from plaudit.monitor.folders import Followed, finite, settings_of, summary
from plaudit.support.visible import visible

BETTER: Mapping[str, Callable[[float, float], float] | None] = {"max": max, "min": min, "none": None}
COLUMNS = {figure.name: BETTER[way] for way in BETTER for figure in FIGURES if figure.better == way}
"""{figure of a row: max or min, whichever of two values is better; None if neither is}."""
PATIENCE = 1.0
"""Seconds that a request spends on reading figures; the rest is read by the next request."""
KEYS, LONG = 200, 120
"""Most settings in the table, and most characters of a setting's value."""
OWN = ("name", "output", "resume", "overwrite")
"""Settings that only identify a run, and are not compared."""


class Best(Followed):
    """The last and the best value of each figure of a file that grows, {"accuracy": (last, step, best, step)}."""

    def keep(self, record: dict[str, Any]) -> None:
        if (step := finite(record.get("step"))) is None:
            return
        found = dict(self.records[0]) if self.records else {}
        for name, better in COLUMNS.items():
            if (value := finite(record.get(name))) is None:
                continue
            best, at = found[name][2:] if name in found else (value, step)
            if better is not None and best != value and better(best, value) == value:
                best, at = value, step
            found[name] = (value, step, *((best, at) if better is not None else (None, None)))
        self.records = [found]


def table(runs: Mapping[str, Path], files: Callable[[Path], Iterable[Best]]) -> dict[str, Any]:
    """Return the rows and the names of their columns. A row whose figures are still to be read has None in their place,
    and `pending` counts such rows: ask again."""
    settings = {name: _settings(path) for name, path in runs.items()}
    keys = [key for key in dict.fromkeys(key for one in settings.values() for key in one) if key not in OWN]
    keys = [key for key in keys if len({one.get(key) for one in settings.values() if one}) > 1][:KEYS]
    until, rows = time.monotonic() + PATIENCE, []
    for name, path in runs.items():
        figures = _figures(files(path)) if time.monotonic() < until else None
        chosen = {key: settings[name][key][:LONG] for key in keys if key in settings[name]}
        rows.append(summary(name, path) | {"settings": chosen, "figures": figures})
    pending = sum(row["figures"] is None for row in rows)
    return {"settings": keys, "figures": list(COLUMNS), "rows": rows, "pending": pending}


def _figures(files: Iterable[Best]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in files:
        try:
            found |= next(iter(file.look()), {})
        except (OSError, ValueError):  # the list of runs gives the reason
            continue
    return found


def _settings(folder: Path) -> dict[str, str]:
    """Return a run's settings as texts by key; {} if they cannot be read."""
    try:
        found = settings_of(folder)
        return {
            key: visible(one if isinstance(one, str) else json.dumps(one, skipkeys=True)) for key, one in found.items()
        }
    except (OSError, ValueError):
        return {}
