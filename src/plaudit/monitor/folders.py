"""The runs below a folder, as the page shows them: what they are, how they go, their settings and figures. Only reads.

settings.yaml, log.txt, metrics.jsonl, health.jsonl, events.jsonl -> plain values, as JSON has them
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from plaudit.support.fields import flat
from plaudit.support.visible import visible

DEPTH = 4
"""How far below the folder runs are looked for."""
MOST = 500
"""Runs that are shown, the newest."""
SILENT = 120.0
"""Seconds without a word after which a run that has not ended is called silent."""
MEASURED = ("validation/", "evaluation/")
"""Beginnings of the names of figures that few steps have."""
POINTS = 3000
"""Steps that a curve has at most; of more, every n-th and the last."""
TAIL = 16_000
"""Bytes of a log's end."""
EVALUATED = "evaluations.jsonl"
"""Figures of a run's checkpoints that were evaluated beside it."""
PORT = 8010
"""The port of `plaudit monitor --serve`, unless another one is given."""
RUN = ("metrics.jsonl", "settings.yaml")
"""A folder with one of these is a run."""
_STEP = re.compile(r"step +(\d+)/(\d+)")


def address_of_run(folder: Path) -> str:
    """Where a browser finds a run while its parent folder is served on this machine."""
    return f"http://127.0.0.1:{PORT}/#{urlencode({'run': folder.name})}"


def runs_in(folder: Path) -> dict[str, Path]:
    """Return the runs by name, which is their path below the folder ("." for the folder itself), the newest first."""
    found = {}
    for path in _folders(folder, DEPTH):
        if any((path / name).is_file() for name in RUN):
            found[path.relative_to(folder).as_posix()] = path
    newest = sorted(found, key=lambda name: -changed(found[name]))[:MOST]
    return {name: found[name] for name in newest}


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth and not (folder / "checkpoints").is_dir():
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            yield from _folders(path, depth - 1)


def changed(folder: Path) -> float:
    """Return when a run's figures or its log were last written, in seconds since 1970."""
    times = [path.stat().st_mtime for name in (*RUN, "log.txt") if (path := folder / name).exists()]
    return max(times, default=0.0)


def summary(name: str, folder: Path) -> dict[str, Any]:
    """One row of the list of runs."""
    log = _tail(folder / "log.txt")
    steps = _STEP.findall(log)
    told = [line[20:] for line in log.splitlines() if line[20:21].strip()]  # an indented line belongs to one above
    last = told[-1] if told else ""
    state = "running" if time.time() - changed(folder) < SILENT else "silent"
    if last.startswith("done:"):
        state = "done"
    elif last.startswith("the run ended:"):
        state = "stopped" if "stopped" in last else "failed"
    step = int(steps[-1][0]) if steps else 0
    return {
        "name": name,
        "method": settings_of(folder).get("method", ""),
        "state": state,
        "step": step,
        "steps": int(steps[-1][1]) if steps else 0,
        "changed": changed(folder),
        "answers": (folder / "samples.jsonl").exists(),
        "last": visible(last[:300], line=True) if state in ("failed", "stopped") else "",
    }


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode("utf-8", errors="replace")


def settings_of(folder: Path) -> dict[str, Any]:
    """A run's settings by key, {"learn.precision": "float32"}; {} if the file is absent or was cut off."""
    import yaml

    try:
        tree = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return flat(tree) if isinstance(tree, dict) else {}


class Followed:
    """The records of a JSON-lines file that grows. Each look reads only what is new; a file that was replaced is read
    again."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._read, self._identity = 0, (0, 0)

    def look(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        found = self.path.stat()
        if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._read:
            self.records, self._read, self._identity = [], 0, (found.st_dev, found.st_ino)
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # torn, or being written
                self._read += len(line)
                record = _parsed(line)
                if record is not None:
                    self.records.append(record)
        return self.records


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def joined(records: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records by step, with what others say of the same step."""
    found = {record["step"]: record for record in records if "step" in record}
    for record in more:
        found[record["step"]] = {**found.get(record["step"], {}), **record}
    return [found[step] for step in sorted(found)]


def columns(records: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return figures as columns, with None for a step that lacks the figure. Of a long run, they have every n-th
    step."""
    every = max(1, -(-len(records) // POINTS))
    kept = records[::every]
    if records and kept[-1] is not records[-1]:
        kept.append(records[-1])
    names = dict.fromkeys(name for record in kept for name, value in record.items() if _is_number(value))
    if every > 1:  # figures of few steps, such as a validation's, are not left out
        rare = [name for name in names if name.startswith(MEASURED)]
        more = [record for record in records if any(name in record for name in rare)]
        kept = sorted({record["step"]: record for record in (*kept, *more)}.values(), key=lambda one: one["step"])
    return {name: [_number(record.get(name)) for record in kept] for name in names}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings in which two runs differ, by key."""
    keys = dict.fromkeys((*one, *other))
    return [{"key": key, "a": one.get(key), "b": other.get(key)} for key in keys if one.get(key) != other.get(key)]
