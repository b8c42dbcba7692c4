"""The typed content of a row: one `Sample`, which every dialect fills, and the four records made from it.

dict row -> (dialect) Sample -> Demonstration | Preference | Judgement | Question
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
    """What the chat turn holds beside its content, such as thoughts and calls."""
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
    """All that a row says. `messages` are the chat's turns before the answer; if there are any, `prompt` is ""."""

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

    def asked(self) -> dict[str, Any]:
        """Return the keyword arguments for the fields of `Record`, which all kinds of record have."""
        return {
            "prompt": self.prompt,
            "messages": self.messages,
            "where": self.where,
            "arguments": self.arguments,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The fields of every kind of record. The prompt is in `prompt` or `messages`; both are empty for a plain text."""

    prompt: str
    messages: tuple[Message, ...]
    where: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Record):
    """A prompt and the answer to imitate."""

    completion: str
    turn: Message = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference(Record):
    """A prompt and its pairs, at least one."""

    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(Record):
    """A prompt and at least one answer, each called good or bad."""

    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Record):
    """A prompt to be answered. Rule rewards compare with the reference `answer` (None: there is none), never cut."""

    answer: str | None
    extra: Mapping[str, Any]


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
    """Why rows of this dialect are no records of other kinds than `gives`. Such rows are refused, not read in a dialect
    that needs fewer of their columns."""
    precedence: int = 3
    """Decides between dialects that all fit a row's columns: the highest wins, then the one that needs more columns,
    then the one added first. Built-in ones have 2 with answers, 1 with pairs and 0 with only prompts."""

    def columns(self) -> frozenset[str]:
        return frozenset(name for entry in (*self.needs, *self.may) for name in entry.split("|"))

    def read_of(self, fields: Fields) -> set[str]:
        """Return the columns that `read` takes from a row: of each entry, the first alternative that the row has."""
        entries = [entry.split("|") for entry in (*self.needs, *self.may)]
        return {name for names in entries for name in [one for one in names if fields.has(one)][:1]}

    def matches(self, fields: Fields) -> bool:
        there = all(any(fields.has(name) for name in entry.split("|")) for entry in self.needs)
        return there and self.fits(fields)


def beside(turn: Message) -> Message:
    """Return what a turn holds beside role and content."""
    return {key: value for key, value in turn.items() if key not in ("role", "content")}
