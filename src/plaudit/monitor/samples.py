"""A run's answers: `samples.jsonl` with one line per answer, and an index of where each step's lines are.

    groups of a step -> Samples.write -> samples.jsonl, samples.index.jsonl -> stretches -> a reader that seeks

The run only appends, within a budget of bytes. If a crash left the index shorter than the file, it is completed from
the file. Left out: reading answers, which `answers.py` does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from plaudit.monitor.sinks import as_line, replace_file
from plaudit.support.bounded import UnreadableError, lines, record

FIRST = 0.05
"""Share of the budget that the first step may take, so that a long run records its first answers completely."""

Groups = Iterable[Iterable[Mapping[str, Any]]]
"""Groups of answers, as lazy iterables."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where the lines of one step are in samples.jsonl."""

    step: int
    begin: int
    """Byte offset of the first line."""
    end: int
    answers: int
    groups: int
    of: int
    """Number of groups that the step had; fewer are recorded if the budget is used up."""


class Samples:
    """Append the answers of a run of `steps` steps, at most `budget` bytes. Lines of steps after `after`, where the run
    continues, are removed.

    The budget is spread evenly over the steps; later steps may use what earlier ones left. The first step may take the
    share FIRST of it. At least one group of each validation is recorded.
    """

    def __init__(self, path: Path, *, budget: int, steps: int, after: int):
        self.path, self.budget, self.steps = path, budget, steps
        self._file: BinaryIO | None = None
        self._index: BinaryIO | None = None
        before = [one for one in stretches(path) if one.step <= after]
        self._size = before[-1].end if before else 0
        self._begun = max((one.end for one in before if one.step <= 1), default=0)
        if path.exists():
            os.truncate(path, self._size)
            replace_file(index_of(path), b"".join(_indexed(one) for one in before))

    def write(self, step: int, kinds: Mapping[str, tuple[int, Groups]]) -> None:
        """Record a step's groups: for each kind, such as "train", their number and their answers."""
        lines: list[bytes] = []
        groups, limit = 0, self._limit(step)
        for kind, (_, found) in kinds.items():
            for number, group in enumerate(found):
                made = [as_line({"step": step, "kind": kind, **one}).encode() for one in group]
                size = self._size + sum(map(len, lines)) + sum(map(len, made))
                if size > (self.budget if number < guaranteed(kind, step) else limit):
                    break
                lines += made
                groups += 1
        if lines:
            begin, self._size = self._size, self._size + sum(map(len, lines))
            of = sum(number for number, _ in kinds.values())
            self._append(lines, Stretch(step, begin, self._size, len(lines), groups, of))
        if step <= 1:
            self._begun = self._size

    def bytes_left(self, step: int) -> int:
        """Return how many bytes a step may still write, besides groups that are always recorded (`guaranteed`)."""
        return max(0, self._limit(step) - self._size)

    def _limit(self, step: int) -> int:
        """Return the largest size in bytes that the file may have after a step."""
        if step >= self.steps:
            return self.budget
        if step <= 1:
            return int(self.budget * FIRST)
        return self._begun + (self.budget - self._begun) * (step - 1) // (self.steps - 1)

    def _append(self, lines: list[bytes], stretch: Stretch) -> None:
        if self._file is None or self._index is None:
            self._file, self._index = self.path.open("ab", buffering=0), index_of(self.path).open("ab", buffering=0)
        self._file.write(b"".join(lines))
        self._index.write(_indexed(stretch))

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._file, self._index):
            if file is not None:
                file.close()


def guaranteed(kind: str, step: int) -> int:
    """Number of groups of a kind that a step records even if they need more than its share of the budget."""
    return 1 if kind == "validation" or step == 1 else 0


def index_of(path: Path) -> Path:
    """Return the path of the index of a samples.jsonl."""
    return path.with_suffix(".index.jsonl")


def stretches(path: Path, most: float = math.inf) -> list[Stretch]:
    """Return where each step's answers are, also in a file that is being written or that a crash left incomplete.
    Raises UnreadableError if a step, or what the index lacks, has more than `most` bytes."""
    size, index = path.stat().st_size if path.exists() else 0, index_of(path)
    found: list[Stretch] = []
    for _, line in lines(index) if index.exists() else ():
        one = _stretch(line)
        if one is None or one.begin != (found[-1].end if found else 0) or not one.begin < one.end <= size:
            break
        found.append(one)
    end = found[-1].end if found else 0
    if (largest := max((one.end - one.begin for one in found), default=0)) > most or size - end > most:
        raise UnreadableError(f"{path}: {max(largest, size - end):,} bytes are of one step, or not in its index")
    return found if end == size else [*found, *_scanned(path, end)]


def lines_between(path: Path, begin: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of each whole line from `begin` on."""
    return takewhile(lambda one: end is None or one[0] < end, lines(path, begin))


def answer_of(path: Path, place: int, line: bytes) -> dict[str, Any]:
    """Parse the line of samples.jsonl at byte `place`. Raises UnreadableError unless it is a valid answer."""
    try:
        found = record(line)
    except ValueError as error:
        raise UnreadableError(f"{path}: no answer begins at byte {place}: {error}") from error
    parts, versions = found.get("parts") or {}, found.get("versions") or []
    if type(found.get("step")) is not int or not isinstance(parts, dict) or not isinstance(versions, list):
        raise UnreadableError(f"{path}: the line at byte {place} is no answer: it needs a step, parts and versions")
    return found


def _stretch(line: bytes) -> Stretch | None:
    """Parse a line of the index; None if it is invalid."""
    try:
        one = Stretch(**record(line))
    except (ValueError, TypeError):
        return None
    return one if all(type(value) is int for value in asdict(one).values()) else None


def _scanned(path: Path, begin: int) -> Iterator[Stretch]:
    """Yield the steps of the lines that the index lacks. Raises UnreadableError for a line that is no answer."""
    step, start, answers, groups = -1, begin, 0, set[Any]()
    for place, line in lines_between(path, begin):
        one = answer_of(path, place, line)
        if one["step"] != step and answers:
            yield Stretch(step, start, place, answers, len(groups), len(groups))
            start, answers, groups = place, 0, set()
        step, begin = one["step"], place + len(line)
        answers += 1
        groups.add((str(one.get("kind")), str(one.get("group"))))
    if answers:
        yield Stretch(step, start, begin, answers, len(groups), len(groups))


def _indexed(stretch: Stretch) -> bytes:
    return (json.dumps(asdict(stretch)) + "\n").encode()
