"""Counts of rows: taken while they are read, and frozen into a report that is printed and saved before training.

Leaves out drawing: the table is plain text lines, the JSON a dict.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from plaudit.data.fields import DataError
from plaudit.support.visible import visible

EXAMPLE = 120
"""Characters of a prompt's end and of a completion that the report quotes."""
Parts = tuple[tuple[str, bool], ...]
"""A row's text in parts: (text, True if it is trained)."""
NAME = 32
"""Characters of a source's name in the table, which then fits a terminal of 80 columns."""
SHOWN = 5
"""Largest number of bad rows, and of unread columns, that the report quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token lengths: nearest-rank percentiles, the longest, and how many were measured."""

    count: int = 0
    p5: int = 0
    p50: int = 0
    p95: int = 0
    max: int = 0

    @classmethod
    def of(cls, lengths: Mapping[int, int]) -> Lengths:
        """Return the lengths of {length: how often}; {} gives zeros."""
        if not lengths:
            return cls()
        ordered = sorted(lengths)
        up_to = [*accumulate(lengths[length] for length in ordered)]
        low, middle, high = (ordered[bisect_left(up_to, math.ceil(share * up_to[-1]))] for share in (0.05, 0.5, 0.95))
        return cls(count=up_to[-1], p5=low, p50=middle, p95=high, max=ordered[-1])


@dataclass(slots=True)
class Budget:
    """Limits how many bad rows may be skipped, over all sources together (`data.bad_rows`)."""

    allowed: int = 0
    spent: int = 0

    def spend(self, error: DataError) -> None:
        """Skip one more row, or raise its error with the setting that would allow it."""
        self.spent += 1
        if self.spent <= self.allowed:
            return
        hint = "Set data.bad_rows=N to skip up to N such rows."
        if self.allowed:
            hint = f"This is bad row number {self.spent}; data.bad_rows={self.allowed} allows no more."
        raise DataError(f"{error.reason} ({hint})", error.where) from error


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one source while it is read and tokenised. `freeze` makes its part of the report."""

    source: str
    role: str = "train"
    budget: Budget = field(default_factory=Budget)
    read: int = 0
    dialects: Counter[str] = field(default_factory=Counter)
    renamed: set[str] = field(default_factory=set)
    """Our columns that some row had under their name in `data.columns`."""
    unread: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """{note: its first example}, for notes that have one."""
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    items: int = 0
    rows: int = 0
    pairs: int = 0
    pairs_dropped: Counter[str] = field(default_factory=Counter)
    turns_dropped: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    chat: Mapping[str, Any] = field(default_factory=dict)
    """How the chat template writes answers (`chat.Form`); empty without chats."""
    example: Parts = ()
    """The first row (or prompt), as parts of text."""
    truncated_prompts: int = 0
    truncated_completions: int = 0
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    completion_lengths: Counter[int] = field(default_factory=Counter)
    trained_tokens: int = 0

    def skip(self, error: DataError) -> None:
        """Count a bad row. Beyond the budget its error is raised."""
        self.bad.append(str(error))
        self.budget.spend(error)

    def note(self, what: str, example: str = "") -> None:
        """Count one more case of `what`: something odd that is used nevertheless."""
        self.noted[what] += 1
        self.examples.setdefault(what, example)

    def freeze(self) -> SourceReport:
        return SourceReport(
            source=self.source,
            role=self.role,
            dialects=dict(self.dialects),
            unread={visible(name, line=True): rows for name, rows in self.unread.items()},
            noted=dict(self.noted),
            noted_examples={what: example for what, example in self.examples.items() if example},
            read=self.read,
            kept=self.items,
            rows=self.rows,
            pairs=self.pairs,
            pairs_dropped=dict(self.pairs_dropped),
            turns_dropped=dict(self.turns_dropped),
            verdicts=dict(self.verdicts),
            dropped=dict(self.dropped),
            bad_rows=len(self.bad),
            bad_examples=tuple(self.bad[:SHOWN]),
            chat=self.chat,
            example=self.example,
            truncated_prompts=self.truncated_prompts,
            truncated_completions=self.truncated_completions,
            prompt_tokens=Lengths.of(self.prompt_lengths),
            completion_tokens=Lengths.of(self.completion_lengths),
            trained_tokens=self.trained_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Counts of one source: read = kept + dropped + bad rows. Lengths are those of kept rows, after truncation."""

    source: str
    role: str
    """"train" or "validation"."""
    dialects: Mapping[str, int]
    """Rows by the dialect they were read in."""
    unread: Mapping[str, int]
    """{column that is not used: number of rows in which it is not empty}. Prompts keep all columns for rewards."""
    noted: Mapping[str, int]
    """{note on something odd that is used nevertheless: how often}."""
    noted_examples: Mapping[str, str]
    read: int
    kept: int
    """Records that became items: prompts with all their pairs, or chats with all their trained turns."""
    rows: int
    """Token rows that the kept records give: two for each pair, one for each trained turn or judged answer."""
    pairs: int
    pairs_dropped: Mapping[str, int]
    turns_dropped: Mapping[str, int]
    """{reason: number of assistant turns left out of chats whose other turns are trained} (`data.every_turn`)."""
    verdicts: Mapping[str, int]
    """Judged answers of kept records: good ones, bad ones, and left-out ones by reason."""
    dropped: Mapping[str, int]
    """Records left out, by reason."""
    bad_rows: int
    bad_examples: tuple[str, ...]
    """The first few bad rows: where and why."""
    chat: Mapping[str, Any]
    """How the chat template writes answers (`chat.Form`); empty without chats."""
    example: Parts
    """The first row, or prompt, as the model reads it."""
    truncated_prompts: int
    truncated_completions: int
    prompt_tokens: Lengths
    completion_tokens: Lengths
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """All sources of a run."""

    kind: str
    """"demonstrations", "preferences", "judgements" or "prompts"."""
    sources: tuple[SourceReport, ...]
    train_items: int
    validation_items: int
    streamed: bool = False
    """Train sources are read during training; only their first block is counted."""

    def json(self) -> dict[str, Any]:
        """Return plain values for `json.dump`."""
        return asdict(self)

    def table(self, *, measured: bool = False) -> str:
        """Return lines for a terminal: a table of the sources, then what was left out or cut, with reasons.

        `measured` means that the data is for evaluation, not for training."""
        head = ("source", "", "read", "kept", "cut", "dropped", "bad")
        use = "to measure on" if measured else f"to train on, {self.validation_items:,} for validation"
        count = "streamed, counted is the first block," if self.streamed else f"{self.train_items:,}"
        lines = [f"{self.kind}: {count} {use}"]
        sources = [
            replace(source, role="", trained_tokens=0, example=()) if measured else source for source in self.sources
        ]
        lines += _aligned([head, *map(_cells, sources)])
        for source in sources:
            lines += [f"  {source.source}: {note}" for note in _notes(source)]
        return "\n".join(lines)


def _cells(source: SourceReport) -> tuple[str, ...]:
    return (
        source.source if len(source.source) <= NAME else f"...{source.source[3 - NAME :]}",
        source.role,
        f"{source.read:,}",
        f"{source.kept:,}",
        f"{source.truncated_prompts + source.truncated_completions:,}",
        f"{sum(source.dropped.values()):,}",
        f"{source.bad_rows:,}",
    )


def _spread(source: SourceReport) -> Iterator[str]:
    """Yield a line with the percentiles of prompts' and answers' lengths, if any was measured."""
    both = {"prompts": source.prompt_tokens, "answers": source.completion_tokens}
    spreads = [f"{what} {one.p5}/{one.p50}/{one.p95}/{one.max}" for what, one in both.items() if one.count]
    if spreads:
        yield f"tokens (p5/p50/p95/max): {', '.join(spreads)}"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _chat_notes(chat: Mapping[str, Any], *, trained: bool) -> Iterator[str]:
    """Yield notes on how the template asks for an answer and, if rows are `trained`, how it writes the answer."""
    yield f"chats ask for an answer with {chat['asks']!r}"
    if chat["prints_date"]:
        yield "the chat template prints today's date: data.chat_template_kwargs={strftime_now: DATE} fixes it"
    if not trained:
        return
    if chat["between"]:
        yield f"before an answer the chat template writes {chat['between']!r}, which is trained"
    if chat["open_thought"]:
        yield f"the prompt leaves a thought open: {chat['open_thought']}"
    if chat["end"]:
        yield f"answers end with {chat['end']!r}"
    else:
        other = f", the chat template ends them with {chat['other_end'].strip()!r}" if chat["other_end"].strip() else ""
        yield f"answers end with the tokenizer's eos_token{other}"
    if not chat["nests"]:
        yield "turns of a chat do not share one pass: the template writes earlier answers in another way"


def row_line(parts: Parts) -> str:
    """Return a row in one line: the end of each part that is only read, the beginning of each that is trained."""
    shown = (f"trained: {_shown(text, EXAMPLE)}" if trained else _shown(text, -EXAMPLE) for text, trained in parts)
    return " | ".join(shown)


def _shown(text: str, length: int) -> str:
    """Return the quoted beginning of a text, or with a negative length its end; "..." marks what is cut."""
    part = text[:length] if length > 0 else text[length:]
    dots = "" if part == text else "..."
    return f"{part!r}{dots}" if length > 0 else f"{dots}{part!r}"


def _notes(source: SourceReport) -> Iterator[str]:
    yield from _spread(source)
    yield from (f"read as {name}: {count:,}" for name, count in source.dialects.items())
    if source.unread:
        more = f" and {len(source.unread) - SHOWN:,} more" if len(source.unread) > SHOWN else ""
        yield f"columns not read: {', '.join([*source.unread][:SHOWN])}{more}"
    for what, count in source.noted.items():
        example = source.noted_examples.get(what)
        yield f"{what}: {count:,}" + (f", the first: {example}" if example else "")
    if source.pairs or source.pairs_dropped:
        yield f"pairs: {source.pairs:,}"
    if source.trained_tokens:
        yield f"trained tokens: {source.trained_tokens:,}"
    yield from (f"pairs left out, {reason}: {count:,}" for reason, count in source.pairs_dropped.items())
    if source.chat:
        yield from _chat_notes(source.chat, trained=source.trained_tokens > 0)
    yield from (f"answers {what}: {count:,}" for what, count in source.verdicts.items())
    if source.example:
        yield f"a row: {row_line(source.example)}" if source.rows else f"a prompt: {row_line(source.example)}"
    if source.kept < source.rows and not source.pairs and not source.verdicts:
        yield f"assistant turns: {source.rows:,}"
    yield from (f"turns left out, {reason}: {count:,}" for reason, count in source.turns_dropped.items())
    yield from (f"dropped, {reason}: {count:,}" for reason, count in source.dropped.items())
    if source.truncated_prompts:
        yield f"prompts that lost their beginning: {source.truncated_prompts:,}"
    if source.truncated_completions:
        yield f"answers that lost their end: {source.truncated_completions:,}"
    yield from (f"bad row {example}" for example in source.bad_examples)
    if source.bad_rows > len(source.bad_examples):
        yield f"and {source.bad_rows - len(source.bad_examples):,} more bad rows"
