"""The typed content of a row: a `Sample`, which every dialect fills and which is read as one of four kinds of record.

dict row -> (dialect) Sample -> (`formats.py`) the same, as a record of its kind:

demonstrations: `answer` is the one to imitate     preferences: there are `pairs`
judgements: there are `verdicts`                   prompts: `answer` is the reference, if there is one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plaudit.data.fields import Fields, Message

DEMONSTRATION, PREFERENCE, QUESTION, JUDGEMENT = "demonstrations", "preferences", "prompts", "judgements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt; `margin` says by how much the chosen one should win."""

    chosen: str
    rejected: str
    margin: float = 0.0
    chosen_turn: Message = field(default_factory=dict)
    """The chosen answer's turn without role and content: thoughts, calls."""
    rejected_turn: Message = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An answer that was judged by itself, as good or bad."""

    answer: str
    good: bool
    turn: Message = field(default_factory=dict)
    """What the answer's chat turn holds beside its content, such as thoughts and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All that a row says. `messages` are the chat's turns before the answer; if there are any, `prompt` is "". A plain
    text has neither."""

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    turn: Message = field(default_factory=dict)
    """What the answer's chat turn holds beside its content, such as thoughts and calls."""
    pairs: tuple[Pair, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The row's arguments of the chat template: tools and `chat_template_kwargs`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    guess: str = ""
    """A guess that was made about the row; the report counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A column layout of data rows, and the function that reads them.

    - `needs`: required columns. "input|context" gives alternative names for one: the first that the row has is read,
      and the others are left unread, like any extra column.
    - `may`: optional columns, written in the same form.
    - `gives`: the kinds of record that its rows can be read as.
    - `read`: turns the row's fields into a `Sample`. Raises `DataError` for what it cannot read.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Fields], Sample]
    gives: frozenset[str] = frozenset({DEMONSTRATION, PREFERENCE, QUESTION, JUDGEMENT})
    may: tuple[str, ...] = ()
    fits: Callable[[Fields], bool] = lambda fields: True
    """With `data.dialect=auto`: what a row must fulfil besides having the columns."""
    refusal: str = ""
    """Why rows of this dialect cannot be read as other kinds of record than `gives`. If set, such rows are refused, and
    not read in another dialect that needs fewer of their columns."""
    precedence: int = 3
    """Decides between dialects that all fit a row's columns: the highest wins, then the one that needs more columns,
    then the one added first. Built-in ones have 2 with answers, 1 with pairs and 0 with only prompts."""

    def columns(self) -> frozenset[str]:
        return frozenset(name for entry in (*self.needs, *self.may) for name in entry.split("|"))

    def read_of(self, fields: Fields) -> set[str]:
        """Return the columns that `read` uses of a row: for each entry, the first alternative that the row has."""
        entries = [entry.split("|") for entry in (*self.needs, *self.may)]
        return {name for names in entries for name in [one for one in names if fields.has(one)][:1]}

    def matches(self, fields: Fields) -> bool:
        there = all(any(fields.has(name) for name in entry.split("|")) for entry in self.needs)
        return there and self.fits(fields)


def beside(turn: Message) -> Message:
    """Return a turn without its role and content."""
    return {key: value for key, value in turn.items() if key not in ("role", "content")}
