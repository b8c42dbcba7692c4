"""Convert data from one dialect to another: read a source, and write rows that read back as the same records.

    source -> Sample -> rows of the other dialect -> .jsonl, .json or .parquet

Every row is read back before it is written, so a row that a dialect cannot express is refused instead of changed.
Content without a place in the other dialect (an answer, if only prompts are kept) is counted. Chats are never rendered
to text here: that takes a tokenizer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plaudit.data.dialects import ASSISTANT_MARK
from plaudit.data.fields import DataError
from plaudit.data.files import ignore
from plaudit.data.formats import check_columns, check_found, demonstration_of, found, named, sample
from plaudit.data.oasst import unfolded
from plaudit.data.read import scan_rows
from plaudit.data.records import DEMONSTRATION, PREFERENCE, QUESTION, Pair, Sample
from plaudit.data.write import answered, ask, pair_row, turns_of
from plaudit.support.paths import at_home, written_whole

SUFFIXES = (".jsonl", ".json", ".parquet")
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Counts of a conversion: source rows read, rows written, bad rows skipped, and content left out, by kind."""

    read: int
    written: int
    bad: tuple[str, ...]
    lost: Mapping[str, int]

    def summary(self) -> str:
        lines = [f"{self.read:,} rows read, {self.written:,} written, {len(self.bad):,} bad rows skipped"]
        lines += [f"  left out: {what}, {count:,} times" for what, count in self.lost.items()]
        lines += [f"  bad row {row}" for row in self.bad]
        return "\n".join(lines)


def convert(
    source: str,
    target: str | Path,
    *,
    to: str | None,
    dialect: str = "auto",
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    bad_rows: int = 0,
    overwrite: bool = False,
) -> Conversion:
    """Write the rows of `source` to the file `target` in the dialect `to`."""
    writer = _WRITERS.get(to or "")
    if writer is None or to is None:
        raise DataError(f"--to: rows cannot be written as {to!r}. Known: {', '.join(_WRITERS)}.")
    check_columns(columns or {})
    path = at_home(target)
    _check_target(source, path, overwrite)
    lost: Counter[str] = Counter()
    samples, read, bad = _read(source, to, lost, dialect=dialect, columns=columns or {}, split=split, bad_rows=bad_rows)
    if to == "prompt/pos_answers/neg_answers":
        samples = _merged(samples)
    rows = [row for one in samples for row in _written(one, to, writer, lost)]
    _save(rows, path)
    return Conversion(read=read, written=len(rows), bad=tuple(bad), lost=dict(lost))


def _read(
    source: str, to: str, lost: Counter[str], *, dialect: str, columns: Mapping[str, str], split: str, bad_rows: int
) -> tuple[list[Sample], int, list[str]]:
    samples: list[Sample] = []
    bad: list[str] = []
    renamed: set[str] = set()
    read = 0
    for where, row in unfolded(scan_rows(source, split=split), _kind(to), ignore):
        read += 1
        try:
            if isinstance(row, DataError):
                raise row
            renamed.update(ours for ours, theirs in columns.items() if found(row, theirs))
            samples.append(_sample(row, to, lost, where=where, dialect=dialect, columns=columns))
        except DataError as error:
            bad.append(str(error))
            if len(bad) > bad_rows:
                raise
    check_found(columns, renamed)
    return samples, read, bad


def _sample(row: Any, to: str, lost: Counter[str], *, where: str, dialect: str, columns: Mapping[str, str]) -> Sample:
    """Return the row as the kind of record that dialect `to` holds; a chat may lack an answer, or go on after it."""
    kind = _kind(to)
    try:
        read, _ = sample(row, kind=kind, where=where, dialect=dialect, columns=columns)
        if kind != DEMONSTRATION or (to == "messages" and read.answer is None and not read.pairs):
            return read
        shown = demonstration_of(read)
        if len(shown.messages) < len(read.messages):
            lost["turns after the last answer"] += len(read.messages) - len(shown.messages) - 1
        return shown
    except DataError:
        if to != "messages":
            raise
        read, _ = sample(row, kind=QUESTION, where=where, dialect=dialect, columns=columns)
        return read


def _kind(to: str) -> str:
    gives = named(to).gives
    return PREFERENCE if PREFERENCE in gives else DEMONSTRATION if DEMONSTRATION in gives else QUESTION


def _written(one: Sample, to: str, writer: Callable[[Sample], Rows], lost: Counter[str]) -> Rows:
    kind = _kind(to)
    rows = writer(one)
    done = _kept(one, kind)
    back = [sample(row, kind=QUESTION if to == "messages" else kind, where=one.where, dialect=to)[0] for row in rows]
    asked = {_asked_key(read) for read in back}
    answers = [(read.answer, read.turn) for read in back]
    pairs = tuple(pair for read in back for pair in read.pairs)
    if asked != {_asked_key(done)} or any(one != (done.answer, done.turn) for one in answers) or pairs != done.pairs:
        raise DataError(f"the row cannot be written as {to!r}: read back, it would differ.", one.where)
    if one.answer is not None and done.answer is None:
        lost["an answer"] += 1
    if one.pairs and not done.pairs:
        lost["pairs" if done.answer is None else "pairs, except the first chosen answer"] += 1
    taken = named(to).columns()
    for name in one.extra:
        if name in taken:
            lost[f"the column {name}, whose name is taken"] += 1
    extra = {name: value for name, value in one.extra.items() if name not in taken}
    return [{**row, **extra} for row in rows]


def _kept(one: Sample, kind: str) -> Sample:
    """Return a sample with only those parts that a record of this kind holds."""
    if kind == PREFERENCE:
        return replace(one, answer=None, turn={})
    if kind == DEMONSTRATION:
        return replace(one, pairs=())
    return replace(one, pairs=(), answer=None, turn={})


def _asked_key(one: Sample) -> str:
    """Return a key for a prompt, equal for a text and for a chat of one user turn with that text."""
    return json.dumps(turns_of(one))


def _merged(samples: Sequence[Sample]) -> list[Sample]:
    """Merge samples whose prompt and further columns are equal, at the position of the first of them."""
    merged: dict[str, Sample] = {}
    for one in samples:
        key = json.dumps([ask(one), one.extra], sort_keys=True, default=repr)
        merged[key] = replace(merged[key], pairs=merged[key].pairs + one.pairs) if key in merged else one
    return list(merged.values())


def _answered(asked: str, name: str) -> Callable[[Sample], Rows]:
    return lambda one: [{asked: ask(one), name: answered(one.answer or "", one.turn)}]


def _paired(asked: str) -> Callable[[Sample], Rows]:
    return lambda one: [pair_row(one, pair, asked=asked) | _margin(pair) for pair in one.pairs]


def _chats(one: Sample) -> Rows:
    answer = [] if one.answer is None else [{"role": "assistant", "content": one.answer, **one.turn}]
    return [{"messages": turns_of(one) + answer}]


def _answer_lists(one: Sample) -> Rows:
    row: dict[str, Any] = {
        "prompt": ask(one),
        "pos_answers": [pair.chosen for pair in one.pairs],
        "neg_answers": [pair.rejected for pair in one.pairs],
    }
    return [row | ({"margin": [p.margin for p in one.pairs]} if any(p.margin for p in one.pairs) else {})]


def _transcripts(one: Sample) -> Rows:
    if one.messages:
        turns = turns_of(one)
        said = [((p.chosen, p.chosen_turn), (p.rejected, p.rejected_turn)) for p in one.pairs]
        chats = [[[*turns, {"role": "assistant", "content": text, **turn}] for text, turn in pair] for pair in said]
        return [{"chosen": c, "rejected": r, **_margin(p)} for (c, r), p in zip(chats, one.pairs, strict=True)]
    if not one.prompt.endswith(ASSISTANT_MARK):
        raise DataError(
            f"a transcript needs a chat, or a prompt that ends in {ASSISTANT_MARK!r}, to tell the answers from it.",
            one.where,
        )
    return [
        {"chosen": one.prompt + pair.chosen, "rejected": one.prompt + pair.rejected, **_margin(pair)}
        for pair in one.pairs
    ]


def _texts(one: Sample) -> Rows:
    if one.messages or one.prompt:
        raise DataError("the dialect 'text' has no place for a prompt.", one.where)
    return [{"text": one.answer}]


def _margin(pair: Pair) -> dict[str, float]:
    return {"margin": pair.margin} if pair.margin else {}


_WRITERS: dict[str, Callable[[Sample], Rows]] = {
    "prompt/completion": _answered("prompt", "completion"),
    "prompt/answer": _answered("prompt", "answer"),
    "question/answer": _answered("question", "answer"),
    "instruction/response": _answered("instruction", "response"),
    "messages": _chats,
    "prompt/chosen/rejected": _paired("prompt"),
    "instruction/chosen/rejected": _paired("instruction"),
    "prompt/pos_answers/neg_answers": _answer_lists,
    "chosen/rejected": _transcripts,
    "text": _texts,
    "prompt": lambda one: [{"prompt": ask(one)}],
}
TARGETS = tuple(_WRITERS)
"""Dialects that rows can be written in."""


def _check_target(source: str, path: Path, overwrite: bool) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"a file with the ending {path.suffix!r} cannot be written; use {', '.join(SUFFIXES)}.", str(path)
        )
    read = at_home(source)
    inside = read.is_dir() and path.resolve().is_relative_to(read.resolve())
    if inside or (path.exists() and read.exists() and path.samefile(read)):
        raise DataError("it is the source; write to another file.", str(path))
    if path.exists() and not overwrite:
        raise DataError("it exists already; name another file or use --overwrite.", str(path))


def _save(rows: Rows, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_whole(path) as part:
            if path.suffix.lower() == ".parquet":
                _save_parquet(rows, part)
            else:
                lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
                one_list = path.suffix.lower() == ".json"
                text = "[\n" + ",\n".join(lines) + "\n]\n" if one_list else "".join(f"{line}\n" for line in lines)
                part.write_text(text, encoding="utf-8")
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:  # Arrow raises all four
        raise DataError(f"a column holds what this file format cannot: {error}", str(path)) from error


def _save_parquet(rows: Rows, path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = arrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table, path)
