"""Read the runs below a folder for the page: their state and progress, settings and figures. Nothing is written.

settings.yaml, log.txt, metrics.jsonl, health.jsonl, events.jsonl -> plain values, as JSON has them

A folder may be anyone's: for a run that cannot be read the reason is shown, and other runs are shown as usual.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from plaudit.support.bounded import MOST as MOST_BYTES
from plaudit.support.bounded import UnreadableError, lines, opened, parsed, yaml_text
from plaudit.support.fields import flat
from plaudit.support.visible import visible

DEPTH = 4
"""Depth of folders to which runs are searched for."""
MOST = 500
"""Largest number of runs that are shown, the newest ones."""
LOOKED_AT, ENTRIES = 20_000, 10_000
"""Most folders that are searched for runs, and most entries read of each."""
SILENT = 120.0
"""Seconds without new output after which a run that has not ended is shown as silent."""
MEASURED = ("validation/", "evaluation/")
"""Prefixes of figures that only few steps have."""
POINTS = 3000
"""Most points of a curve; of more steps, every n-th and the last one are shown."""
NAMES = 1000
"""Most figures that are shown of a run; NAMES times POINTS bounds the size of a response."""
TAIL = 16_000
"""Bytes that are read from the end of a log."""
EVALUATED = "evaluations.jsonl"
"""File with figures of checkpoints that `plaudit evaluate --follow` measured."""
PORT = 8010
"""The port of `plaudit monitor --serve`, unless another one is given."""
RUN = ("metrics.jsonl", "settings.yaml")
"""A folder with one of these is a run."""
FILES = (*RUN, "log.txt", "samples.jsonl", "samples.index.jsonl", "health.jsonl", "events.jsonl", EVALUATED)
"""Files of a run's folder that are read."""
_STEP = re.compile(r"step +(\d+)/(\d+)")
_TOLD = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (done:|the run ended:|step +\d+/|\w+: logs .*in .*, checkpoints in )(.*)", re.M
)
"""Lines of log.txt that tell a run's state. Others may follow its end: of a pipeline's next stage, an evaluation."""


def address_of_run(folder: Path) -> str:
    """Return the URL of a run's page while `plaudit monitor --serve` serves its parent folder on the usual port."""
    return f"http://127.0.0.1:{PORT}/#{urlencode({'run': folder.name})}"


def runs_in(folder: Path) -> dict[str, Path]:
    """Return the runs by name, which is their path below the folder ("." for the folder itself), the newest first."""
    found = dict(islice(_folders(folder, ".", DEPTH, set()), LOOKED_AT))
    runs = {name: path for name, path in found.items() if any(os.path.lexists(path / one) for one in RUN)}
    newest = sorted(runs, key=lambda name: -changed(runs[name]))[:MOST]
    return {visible(name, line=True): runs[name] for name in newest}


def _folders(folder: Path, name: str, depth: int, visited: set[tuple[int, int]]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of `folder` and the folders below it, each once even if several links lead to it."""
    try:
        found = folder.stat()
        if (found.st_dev, found.st_ino) in visited:
            return
        visited.add((found.st_dev, found.st_ino))
        with os.scandir(folder) as entries:
            inner = [one.name for one in islice(entries, ENTRIES) if not one.name.startswith(".") and _is_folder(one)]
    except OSError:
        return
    yield name, folder
    if depth and "checkpoints" not in inner:
        for one in sorted(inner):
            yield from _folders(folder / one, one if name == "." else f"{name}/{one}", depth - 1, visited)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links that form a circle
        return False


def changed(folder: Path) -> float:
    """Return when a run's figures or its log were last written, in seconds since 1970."""
    return max((_stat(folder / name)[0] for name in (*RUN, "log.txt")), default=0.0)


def _stat(path: Path) -> tuple[float, int]:
    """Return when a file was last written (seconds since 1970) and its size; zeros if it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def summary(name: str, folder: Path) -> dict[str, Any]:
    """Return one row of the list of runs. A run whose files cannot be read has the state "unreadable" and a reason."""
    row = {"name": name, "method": "", "state": "unreadable", "step": 0, "steps": 0, "changed": changed(folder)}
    row |= {"answers": os.path.lexists(folder / "samples.jsonl"), "last": ""}
    try:
        for one in FILES:
            if os.path.lexists(folder / one):
                opened(folder / one).close()
        return row | _progress(folder) | {"method": str(settings_of(folder).get("method", ""))[:100]}
    except (OSError, ValueError) as error:
        return row | {"last": visible(str(error)[:300], line=True)}


def _progress(folder: Path) -> dict[str, Any]:
    """Return a run's state, step and number of steps, and in `last` the line with which it failed or was stopped."""
    log = _tail(folder / "log.txt")
    steps = _STEP.findall(log)
    kind, why = ends[-1] if (ends := _TOLD.findall(log)) else ("", "")
    state = "running" if time.time() - changed(folder) < SILENT else "silent"
    if kind == "done:":
        state = "done"
    elif kind == "the run ended:":
        state = "stopped" if "stopped" in why else "failed"
    step, of = map(int, steps[-1]) if steps else (0, 0)
    shown = visible(f"{kind}{why}"[:300], line=True) if state in ("failed", "stopped") else ""
    return {"state": state, "step": step, "steps": of, "last": shown}


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        return file.read(TAIL).decode("utf-8", errors="replace")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings by key, {"learn.precision": "float32"}; {} without a file. Raises UnreadableError."""
    path = folder / "settings.yaml"
    found = _settings(path, *_stat(path)) if os.path.lexists(path) else {}
    if isinstance(found, UnreadableError):
        raise found
    return found


@lru_cache(MOST)
def _settings(path: Path, written: float, size: int) -> dict[str, Any] | UnreadableError:
    """Read a file of settings, cached by its time and size; return, not raise, the reason why it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(yaml_text(path))
    except UnreadableError as error:
        return error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:  # ValueError: an impossible date
        return UnreadableError(f"{path} cannot be read as settings: {' '.join(str(error).split())}")
    found = flat(tree) if isinstance(tree, dict) else {}
    plain = (str, int, float, list, dict, type(None))
    return {key: value if isinstance(value, plain) else str(value) for key, value in found.items()}


class Followed:
    """The records of a JSON-lines file that grows. Each look reads only what is new; a file that was replaced is read
    again."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._read, self._identity = 0, (0, 0)
        self._lock = threading.Lock()

    def look(self) -> list[dict[str, Any]]:
        """Return all valid records so far; [] without a file. Raises UnreadableError if it is special or too large."""
        with self._lock:
            if not self.path.exists():
                return []
            found = self.path.stat()
            if found.st_size > MOST_BYTES:
                raise UnreadableError(f"{self.path} has {found.st_size:,} bytes: at most {MOST_BYTES:,} are read")
            if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._read:
                self.records, self._read, self._identity = [], 0, (found.st_dev, found.st_ino)
            for begin, line in lines(self.path, self._read):  # an incomplete last line is read later
                self._read = begin + len(line)
                if (one := parsed(line)) is not None:
                    self.keep(one)
            return list(self.records)

    def keep(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def joined(records: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `records` merged with `more` by step, in the order of steps, without records that lack a finite step."""
    found: dict[float, dict[str, Any]] = {}
    for one in records:
        if (step := finite(one.get("step"))) is not None:
            found[step] = one
    for one in more:
        if (step := finite(one.get("step"))) is not None:
            found[step] = {**found.get(step, {}), **one}
    return [found[step] for step in sorted(found)]


def columns(records: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return figures as columns, with None for a step that lacks the figure. Of a long run, they have every n-th
    step."""
    every = max(1, -(-len(records) // POINTS))
    thinned = records[::every]
    if records and thinned[-1] is not records[-1]:
        thinned.append(records[-1])
    items = (item for one in thinned for item in one.items())
    names = dict(islice(dict.fromkeys(name for name, value in items if value in (None, finite(value))).items(), NAMES))
    if every > 1:  # but every value of figures that few steps have, such as validation's
        rare = [name for name in names if name.startswith(MEASURED)]
        more = [one for one in records if any(name in one for name in rare)]
        more = more[:: max(1, -(-len(more) // POINTS))]
        thinned = sorted({record["step"]: record for record in (*thinned, *more)}.values(), key=lambda one: one["step"])
    return {name: [finite(one.get(name)) for one in thinned] for name in names}


def finite(value: Any) -> float | None:
    """Return a number that a float can hold, or None for anything else."""
    try:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return None
    return value if number else None
