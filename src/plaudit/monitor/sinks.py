"""Writes and reads a run's records as JSON lines: one object a line, valid to the last whole line after any crash.

    {"step": 12, "epoch": 0, "time": 31.4, "loss/policy": 0.71, ...}

A `Tracker`, such as TensorBoard's, takes the figures of the same records. Left out: rotation and compression.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from plaudit.support.bounded import MOST, UnreadableError, content, parsed, record
from plaudit.support.paths import written_whole
from plaudit.support.visible import visible

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode


class Tracker(Protocol):
    """Receives figures and texts of each step. The caller writes steps in rising order and calls `close` once."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None:
        """Receive a text of a step: "answers" to a prompt, or a warning of "health"."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """End the record. `failed`: the run failed and may continue later, under the same name."""
        ...


class JsonLines:
    """Appends records to a file and flushes each. Opening it repairs a last line that a crash tore.

    A figure that is not finite is written as null: NaN is not JSON, and many readers stop at it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair(path)
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(as_line(record))
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop every record of a later step, before a resumed run writes those steps again. Other records stay as they
        are."""
        self.close()
        if not self.path.exists():
            return
        _repair(self.path)
        lines = self.path.read_bytes().splitlines(keepends=True)
        before = [line for number, line in enumerate(lines, 1) if _step(line, self.path, number) <= step]
        if len(before) < len(lines):
            replace_file(self.path, b"".join(before))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; a later `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def as_line(record: Mapping[str, Any]) -> str:
    """Encode a record as a line of JSON, control characters escaped. Numbers that are not finite become null."""
    return visible(_encoded(record)) + "\n"


def as_json(values: Any) -> bytes:
    """Encode plain values as JSON in UTF-8. Numbers that are not finite become null."""
    return _encoded(values).encode("utf-8", "backslashreplace")  # lone surrogates as JSON writes them


def _encoded(values: Any) -> str:
    try:
        return _encode(values)
    except (ValueError, TypeError):  # only now: looking for NaN in every record would be slow
        return _encode(_finite(values))


def read_jsonl(path: Path, most: float = math.inf) -> list[dict[str, Any]]:
    """Read every whole record of a file, which may still be written to: a torn last line is left out. Raises ValueError
    for a line that is no JSON object, and for a file of more than `most` bytes."""
    found = content(path, most)
    lines = found.splitlines()
    if lines and not found.endswith(b"\n") and parsed(lines[-1]) is None:
        lines.pop()
    return [_parse(line, path, number) for number, line in enumerate(lines, 1)]


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Read a run's metrics from any source, and check them. Raises ValueError for a record without a step or with a
    figure that is no number."""
    found = read_jsonl(path, MOST)
    for number, one in enumerate(found, 1):
        for name, value in (("step", one.get("step", "")), *one.items()):
            if not (isinstance(value, int | float) or (value is None and name != "step")):
                raise UnreadableError(f"{path}:{number}: {name:.100} is not a number. Remove or correct that line.")
    return found


def _step(line: bytes, path: Path, number: int) -> float:
    """Return the record's step; minus infinity for a record without one, which is therefore kept."""
    return float(_parse(line, path, number).get("step", -math.inf))


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        return record(line)
    except ValueError as error:
        raise UnreadableError(f"{path}:{number} is not JSON ({error}). Remove or correct that line.") from error


def _repair(path: Path) -> None:
    """Make the file end in a newline: add it if the last line is whole, or drop an incomplete last line."""
    content = path.read_bytes() if path.exists() else b""
    if not content or content.endswith(b"\n"):
        return
    begin = content.rfind(b"\n") + 1
    replace_file(path, content + b"\n" if parsed(content[begin:]) is not None else content[:begin])


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content; a crash leaves the old one or the new one."""
    with written_whole(path, durable=True) as temporary:
        temporary.write_bytes(content)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
