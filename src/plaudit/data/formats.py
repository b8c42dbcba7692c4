"""Raw rows to typed records: demonstrations, preferences, judged answers and prompts.

    dict row -> (a dialect of `dialects.py`) Sample -> a record of `records.py`

Leaves out files (`read.py`) and tokens (`tokenize.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from plaudit.data.dialects import BUILT_IN, CHATS
from plaudit.data.fields import IMAGES, DataError, Fields, Message, blank, shown, template_arguments
from plaudit.data.records import (
    DEMONSTRATION,
    JUDGEMENT,
    QUESTION,
    Dialect,
    Sample,
    Verdict,
    beside,
)
from plaudit.support.fields import nearest

_OF_PAIRS = frozenset({"chosen", "rejected", "pos_answers", "neg_answers", "margin"})
_OF_ANSWERS = frozenset({"completion", "response", "output"})
ELSEWHERE = {
    DEMONSTRATION: _OF_PAIRS,
    QUESTION: _OF_PAIRS | _OF_ANSWERS,
    JUDGEMENT: _OF_PAIRS | _OF_ANSWERS | {"answer", "label", "kto_tag"},
}
"""By kind of record: columns that only rows of other kinds need, so that rows of this kind may lack them."""

_DIALECTS = {dialect.name: dialect for dialect in BUILT_IN}


def register_dialect(dialect: Dialect) -> None:
    """Add a dialect, or replace the one of that name."""
    _DIALECTS[dialect.name] = dialect


def dialects() -> dict[str, Dialect]:
    """Return all dialects by name."""
    return dict(_DIALECTS)


def demonstration_of(read: Sample) -> Sample:
    """Return the row with the answer to imitate: its own, else the first chosen, else the last trained turn."""
    if read.answer is not None:
        return read
    if read.pairs:
        return replace(read, answer=read.pairs[0].chosen, turn=read.pairs[0].chosen_turn)
    last = max((i for i, turn in enumerate(read.messages) if speaks(turn)), default=None)
    if last is None:
        why = "there is no answer to imitate; SFT needs a completion in every row."
        if any(turn["role"] == "assistant" for turn in read.messages):
            why = "no assistant turn is to be trained: each is empty, or has weight 0 or train false."
        raise DataError(why, read.where)
    answer = read.messages[last]
    return replace(read, messages=read.messages[:last], answer=answer["content"], turn=beside(answer))


def speaks(turn: Message) -> bool:
    """True for an assistant turn that is trained and says or calls something."""
    says = bool(turn["content"].strip()) or "tool_calls" in turn
    return turn["role"] == "assistant" and says and turn.get("train") is not False


def preference_of(read: Sample) -> Sample:
    """Return the row, which must have pairs. Raises DataError if it has none."""
    if not read.pairs:
        raise DataError("there is no pair of a chosen and a rejected answer.", read.where)
    return read


def judgement_of(read: Sample) -> Sample:
    """Return the row with its judged answers; a pair has a good and a bad one. Raises DataError if it has none."""
    verdicts = read.verdicts
    for pair in read.pairs:
        chosen = Verdict(answer=pair.chosen, good=True, turn=pair.chosen_turn)
        verdicts += (chosen, Verdict(answer=pair.rejected, good=False, turn=pair.rejected_turn))
    if not verdicts:
        raise DataError(
            "there is no answer that is called good or bad; the row needs an answer with some text, and a label (or "
            "kto_tag) that is true, false, 1 or 0.",
            read.where,
        )
    return replace(read, verdicts=verdicts)


def sample(
    row: Any, *, kind: str, where: str, dialect: str = "auto", columns: Mapping[str, str] | None = None
) -> tuple[Sample, str]:
    """Read a row for one `kind` of record. Return the `Sample` and the name of its dialect. Raises DataError."""
    if not isinstance(row, Mapping):
        raise DataError(f"the row is {shown(row)}; it must be an object with columns.", where)
    fields = Fields(_renamed(row, columns or {}), where)
    try:
        read, name = _sample(fields, kind, dialect)
    except DataError as error:
        lacking = [f"{ours}: {theirs}" for ours, theirs in (columns or {}).items() if not found(row, theirs)]
        if not lacking or error.where != where:
            raise
        raise DataError(
            f"{error.reason} The row lacks what data.columns={{{', '.join(lacking)}}} names.", where
        ) from error
    if kind == QUESTION and (theirs := (columns or {}).get("answer", "")) in row:  # as a reward function names it
        read = replace(read, extra={theirs: row[theirs], **read.extra})
    return read, name


def _sample(fields: Fields, kind: str, dialect: str) -> tuple[Sample, str]:
    where = fields.where
    chosen = detect(fields, kind) if dialect == "auto" else named(dialect)
    if kind not in chosen.gives:
        raise DataError(f"rows in the dialect {chosen.name!r} hold no {kind}. {_serving(kind)}", where)
    read = chosen.read(fields)
    taken = chosen.read_of(fields)
    images = [name for name in IMAGES if name not in taken and not blank(fields.row.get(name))]
    if images:
        raise fields.error(
            f"the row has {images[0]}, which is not read: only text is trained on. Leave such rows out; if their text "
            "makes sense without it, leave the column out."
        )
    if kind == QUESTION:
        if read.answer is None and read.messages and read.messages[-1]["role"] == "assistant":  # not trained
            read = replace(read, messages=read.messages[:-1], answer=read.messages[-1]["content"])
        if "answer" not in taken and type(fields.row.get("answer")) in (str, int, float):
            read = replace(read, answer=str(fields.row["answer"]))  # a column besides the answer that the dialect reads
        if not isinstance(fields.row.get("answer"), str):  # a number, which a reward may compare with
            taken = taken - {"answer"}
    extra = {str(name): value for name, value in fields.row.items() if name not in taken and value is not None}
    arguments: Mapping[str, Any] = {}
    if read.messages:
        arguments = {**template_arguments(extra, where), **read.arguments}
    own = {} if kind == JUDGEMENT else read.extra  # for questions, a judged row keeps its judgement as further columns
    return replace(read, where=where, arguments=arguments, extra={**own, **extra}), chosen.name


def named(name: str) -> Dialect:
    known = dialects()
    if name not in known:
        raise DataError(f"data.dialect={name!r} is unknown{nearest(name, ['auto', *known])}")
    return known[name]


def detect(fields: Fields, kind: str) -> Dialect:
    """Return the matching dialect of highest precedence. Raises DataError if there is none or it refuses the `kind`."""
    there = [e for e in dialects().values() if (kind in e.gives or e.refusal) and e.matches(fields)]
    if not there:
        columns = sorted(str(name) for name, value in fields.row.items() if value is not None)
        found = f"the columns {', '.join(columns) or '(none)'} are not a known dialect of {kind}."
        raise fields.error(f"{found} {_override(fields, kind)} {_serving(kind)}".replace("  ", " "))
    best = max(there, key=lambda entry: (entry.precedence, len(entry.needs)))
    if kind not in best.gives:
        raise fields.error(best.refusal)
    return best


def _override(fields: Fields, kind: str) -> str:
    """Return a hint how to set data.columns so that the nearest dialect reads the row; "" if none can be given."""
    chats = any(isinstance(value, list) for value in fields.row.values())
    others = {*(ELSEWHERE.get(kind, ()) if kind != JUDGEMENT else ()), *([] if chats else CHATS.split("|"))}

    def renamed(dialect: Dialect) -> tuple[list[str], list[str], dict[str, str]]:
        lacking = [entry.split("|")[0] for entry in dialect.needs if not any(map(fields.has, entry.split("|")))]
        taken, kinds = dialect.read_of(fields), (str, list, bool, int)[: 4 if kind == JUDGEMENT else 2]
        there = [str(name) for name, value in fields.row.items() if isinstance(value, kinds) and fields.has(str(name))]
        free = [name for name in there if name not in taken]
        return lacking, free, {name: near[0] for name in lacking if (near := get_close_matches(name, free, n=1))}

    def cost(dialect: Dialect) -> tuple[int, int]:
        lacking, free, named = renamed(dialect)
        return max(len(lacking), len(free)) - len(named), len(dialect.needs) * (1 if kind == QUESTION else -1)

    serving = [one for one in dialects().values() if kind in one.gives]
    ours = [one for one in serving if not any({*entry.split("|")} <= others for entry in one.needs)]
    lacking, free, named = renamed(min(ours, key=cost))
    if len(free) == len(lacking):
        named = dict(zip(lacking, free, strict=True)) | named
    if not lacking or any(re.search(r"['\"\\]", name) for name in named.values()):
        return ""
    named = {ours: name if re.fullmatch(r"[\w.]+", name, re.ASCII) else f'"{name}"' for ours, name in named.items()}
    if not free or len({*named.values()}) < len(named):
        return f"The row lacks {' and '.join(lacking)}."
    pairs = ", ".join(f"{name}: {named.get(name, 'COLUMN')}" for name in lacking)
    return f"Name its columns: 'data.columns={{{pairs}}}'."


def _serving(kind: str) -> str:
    return f"{kind.capitalize()} are read from {', '.join(d.name for d in dialects().values() if kind in d.gives)}."


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return row
    taken = set(columns.values())
    others = {name: value for name, value in row.items() if name not in taken and name not in columns}
    return others | {ours: value for ours, theirs in columns.items() for value in found(row, theirs)}


def found(row: Mapping[str, Any], column: str) -> tuple[Any, ...]:
    """Return (value,) of a column, or () if the row lacks it. The name "a.b" is entry b of the object in column a."""
    if column in row:
        return (row[column],)
    outer, dot, inner = column.partition(".")
    within = row.get(outer)
    return found(within, inner) if dot and isinstance(within, Mapping) else ()


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise DataError for a key of data.columns that is no column of any dialect."""
    known = sorted({name for entry in dialects().values() for name in entry.columns()})
    for name in columns:
        if name not in known:
            raise DataError(f"data.columns.{name} is not a column of ours{nearest(name, known)}")


def check_found(columns: Mapping[str, str], renamed: set[str], kind: str | None = None) -> None:
    """Raise DataError if data.columns names a column that no row had: an optional column would be missing silently.

    Rows of one `kind` may lack what only others need, since a pipeline's stages share their settings."""
    serving = [entry.columns() for entry in dialects().values() if kind is None or kind in entry.gives]
    read = frozenset().union(*serving) - ELSEWHERE.get(kind or "", frozenset())
    for ours, theirs in columns.items():
        if ours in read and ours not in renamed:
            raise DataError(f"data.columns={{{ours}: {theirs}}} names a column that no row has: {theirs!r}.")
