"""Raw rows to typed records: what a row means for SFT, for preferences or as a question.

    dict row -> (dialect) Sample -> Demonstration | Preference | Question

Every dialect reads into one `Sample`, and the three records are read off it; so a dialect is written once, in
`dialects.py`. Leaves out files (`read.py`) and tokens (`tokenize.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plaudit.data.fields import DataError, Fields, Message, blank

DEMONSTRATION, PREFERENCE, QUESTION = "demonstrations", "preferences", "prompts"

_OF_PAIRS = frozenset({"chosen", "rejected", "pos_answers", "neg_answers", "margin"})
ELSEWHERE = {DEMONSTRATION: _OF_PAIRS, QUESTION: _OF_PAIRS | {"completion", "response", "output"}}
"""Columns that a kind of record is read from too, but that its own sources need not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt; `margin` is by how much the chosen one should win."""

    chosen: str
    rejected: str
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Whatever a row says. `messages` is the chat that asks, without the answer; `prompt` is "" where it is set."""

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    pairs: tuple[Pair, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and the answer to imitate. Of `prompt` and `messages` one is empty."""

    prompt: str
    completion: str
    messages: tuple[Message, ...]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and its pairs, at least one."""

    prompt: str
    messages: tuple[Message, ...]
    pairs: tuple[Pair, ...]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be answered; `answer` is what a rule reward compares with, whole."""

    prompt: str
    messages: tuple[Message, ...]
    answer: str | None
    extra: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way to write rows down.

    `needs` lists what must be there, each entry a column or its alternatives ("input|context": the first that is there
    is read, others are further columns); `may`, alike, what else is read; `gives` which records it serves. `read` gets
    the row's fields and raises `DataError` for what it cannot read.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Fields], Sample]
    gives: frozenset[str] = frozenset({DEMONSTRATION, PREFERENCE, QUESTION})
    may: tuple[str, ...] = ()
    precedence: int = 3
    """Which one wins where the columns of a row fit several: built-in ones have 2 with answers, 1 with pairs, 0 with
    prompts alone. Of equal ones the one that needs more columns wins, then the one added first."""

    def columns(self) -> frozenset[str]:
        return frozenset(name for entry in (*self.needs, *self.may) for name in entry.split("|"))

    def read_of(self, fields: Fields) -> set[str]:
        """The columns that `read` takes of a row: the first alternative of each entry that is there."""
        entries = [entry.split("|") for entry in (*self.needs, *self.may)]
        return {name for names in entries for name in [one for one in names if fields.has(one)][:1]}

    def matches(self, fields: Fields) -> bool:
        return all(any(fields.has(name) for name in entry.split("|")) for entry in self.needs)


_DIALECTS: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """Add a dialect, or replace the one of that name."""
    import plaudit.data.dialects  # noqa: F401  (the built-in ones first, so that they cannot replace this one later)

    _DIALECTS[dialect.name] = dialect


def dialects() -> dict[str, Dialect]:
    """All dialects by name."""
    import plaudit.data.dialects  # noqa: F401  (registers the built-in ones)

    return dict(_DIALECTS)


def demonstration(
    row: Any, *, where: str, dialect: str = "auto", columns: Mapping[str, str] | None = None
) -> Demonstration:
    """A row as something to imitate. Of preferences it is the first chosen answer."""
    read, _ = sample(row, kind=DEMONSTRATION, where=where, dialect=dialect, columns=columns)
    return demonstration_of(read)


def preference(row: Any, *, where: str, dialect: str = "auto", columns: Mapping[str, str] | None = None) -> Preference:
    """A row as pairs of answers."""
    read, _ = sample(row, kind=PREFERENCE, where=where, dialect=dialect, columns=columns)
    return preference_of(read)


def question(row: Any, *, where: str, dialect: str = "auto", columns: Mapping[str, str] | None = None) -> Question:
    """A row as a prompt to be answered, with the reference answer if it has one."""
    read, _ = sample(row, kind=QUESTION, where=where, dialect=dialect, columns=columns)
    return question_of(read)


def demonstration_of(read: Sample) -> Demonstration:
    """The answer, else the first chosen answer, else the last assistant turn of a chat that a user ended."""
    last = max((i for i, turn in enumerate(read.messages) if turn["role"] == "assistant"), default=None)
    if read.answer is None and not read.pairs and last is not None and read.messages[last]["content"].strip():
        read = replace(read, messages=read.messages[:last], answer=read.messages[last]["content"])
    completion = read.answer if read.answer is not None else read.pairs[0].chosen if read.pairs else None
    if completion is None:
        raise DataError("there is no answer to imitate; SFT needs a completion in every row.", read.where)
    return Demonstration(prompt=read.prompt, completion=completion, messages=read.messages, where=read.where)


def preference_of(read: Sample) -> Preference:
    if not read.pairs:
        raise DataError("there is no pair of a chosen and a rejected answer.", read.where)
    return Preference(prompt=read.prompt, messages=read.messages, pairs=read.pairs, where=read.where)


def question_of(read: Sample) -> Question:
    return Question(prompt=read.prompt, messages=read.messages, answer=read.answer, extra=read.extra, where=read.where)


def sample(
    row: Any, *, kind: str, where: str, dialect: str = "auto", columns: Mapping[str, str] | None = None
) -> tuple[Sample, str]:
    """Read a row for one kind of record; also gives the name of the dialect it was read in."""
    if not isinstance(row, Mapping):
        raise DataError(f"the row is a {type(row).__name__}; it must be an object with columns.", where)
    fields = Fields(_renamed(row, columns or {}), where)
    try:
        return _sample(fields, kind, dialect)
    except DataError as error:
        lacking = [f"{ours}: {theirs}" for ours, theirs in (columns or {}).items() if not found(row, theirs)]
        if not lacking or error.where != where:
            raise
        raise DataError(
            f"{error.reason} The row has not what data.columns={{{', '.join(lacking)}}} names.", where
        ) from error


def _sample(fields: Fields, kind: str, dialect: str) -> tuple[Sample, str]:
    where = fields.where
    chosen = detect(fields, kind) if dialect == "auto" else named(dialect)
    if kind not in chosen.gives:
        raise DataError(f"rows in the dialect {chosen.name!r} hold no {kind}. {_serving(kind)}", where)
    read = chosen.read(fields)
    taken = chosen.read_of(fields)
    if read.messages and "tools" not in taken and not blank(fields.row.get("tools")):
        raise fields.error(
            "the chat has tools, which are not read: the chat template would show them. Write them into the system "
            "turn as text, or leave the column out."
        )
    extra = {str(name): value for name, value in fields.row.items() if name not in taken and value is not None}
    return replace(read, where=where, extra={**read.extra, **extra}), chosen.name


def named(name: str) -> Dialect:
    known = dialects()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"data.dialect={name!r} is unknown.{hint} Known: auto, {', '.join(known)}.")
    return known[name]


def detect(fields: Fields, kind: str) -> Dialect:
    """The dialect of highest precedence that the columns fit and that serves this kind of record."""
    serving = [entry for entry in dialects().values() if kind in entry.gives and entry.matches(fields)]
    if not serving:
        there = sorted(str(name) for name, value in fields.row.items() if value is not None)
        raise fields.error(
            f"the columns {', '.join(there) or '(none)'} are no known dialect of {kind}. {_serving(kind)} "
            "Name other columns with data.columns."
        )
    return max(serving, key=lambda entry: (entry.precedence, len(entry.needs)))


def _serving(kind: str) -> str:
    return f"{kind.capitalize()} are read from {', '.join(d.name for d in dialects().values() if kind in d.gives)}."


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return row
    taken = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in taken and name not in columns}
    return kept | {ours: value for ours, theirs in columns.items() for value in found(row, theirs)}


def found(row: Mapping[str, Any], column: str) -> tuple[Any, ...]:
    """What a row has under that name, if it has it: a column, or a.b for the entry b of an object in column a."""
    if column in row:
        return (row[column],)
    outer, dot, inner = column.partition(".")
    within = row.get(outer)
    return found(within, inner) if dot and isinstance(within, Mapping) else ()


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse overrides of column names that no dialect reads."""
    known = sorted({name for entry in dialects().values() for name in entry.columns()})
    for name in columns:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(f"data.columns.{name} is no column of ours.{hint} Ours are {', '.join(known)}.")


def check_found(columns: Mapping[str, str], renamed: set[str], kind: str | None = None) -> None:
    """Refuse overrides that name a column no row had: what is optional would be missing from all, without a word. Rows
    of one `kind` may lack what is another's: a pipeline's stages and an evaluation's sources share their settings."""
    serving = [entry.columns() for entry in dialects().values() if kind is None or kind in entry.gives]
    read = frozenset().union(*serving) - ELSEWHERE.get(kind or "", frozenset())
    for ours, theirs in columns.items():
        if ours in read and ours not in renamed:
            raise DataError(f"data.columns={{{ours}: {theirs}}} names a column that no row has: {theirs!r}.")
