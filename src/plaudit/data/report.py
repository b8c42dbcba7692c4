"""What became of the rows: counted while they are read, frozen into a report that is printed and saved before training.

Leaves out drawing: the table is plain text lines, the JSON a dict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plaudit.data.fields import DataError

SHOWN = 5
"""How many bad rows the report quotes, and columns that were not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token lengths: nearest-rank percentiles, the longest, and how many were measured."""

    count: int = 0
    p5: int = 0
    p50: int = 0
    p95: int = 0
    max: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        ordered = sorted(lengths)
        if not ordered:
            return cls()
        low, middle, high = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.05, 0.5, 0.95))
        return cls(count=len(ordered), p5=low, p50=middle, p95=high, max=ordered[-1])


@dataclass(slots=True)
class Budget:
    """How many bad rows may be skipped, of all sources together."""

    allowed: int = 0
    spent: int = 0

    def spend(self, error: DataError) -> None:
        """Skip one more, or raise its error with what allows that."""
        self.spent += 1
        if self.spent <= self.allowed:
            return
        hint = "Set data.bad_rows=N to skip up to N such rows."
        if self.allowed:
            hint = f"This is bad row number {self.spent}; data.bad_rows={self.allowed} allows no more."
        raise DataError(f"{error.reason} ({hint})", error.where) from error


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one source while it is read and tokenised. `freeze` makes the part of the report."""

    source: str
    role: str = "train"
    budget: Budget = field(default_factory=Budget)
    read: int = 0
    dialects: Counter[str] = field(default_factory=Counter)
    renamed: set[str] = field(default_factory=set)
    """Columns of ours that some row had under the name that `data.columns` gives."""
    unread: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    items: int = 0
    rows: int = 0
    pairs: int = 0
    pairs_dropped: Counter[str] = field(default_factory=Counter)
    turns_dropped: Counter[str] = field(default_factory=Counter)
    template_end: str = ""
    """What the chat template ends an answer with, if not the end token."""
    truncated_prompts: int = 0
    truncated_completions: int = 0
    prompt_lengths: list[int] = field(default_factory=list)
    completion_lengths: list[int] = field(default_factory=list)
    trained_tokens: int = 0

    def skip(self, error: DataError) -> None:
        """Count a bad row; beyond the budget it is raised."""
        self.bad.append(str(error))
        self.budget.spend(error)

    def freeze(self) -> SourceReport:
        return SourceReport(
            source=self.source,
            role=self.role,
            dialects=dict(self.dialects),
            unread={name.encode("utf-8", "backslashreplace").decode(): rows for name, rows in self.unread.items()},
            read=self.read,
            kept=self.items,
            rows=self.rows,
            pairs=self.pairs,
            pairs_dropped=dict(self.pairs_dropped),
            turns_dropped=dict(self.turns_dropped),
            dropped=dict(self.dropped),
            bad_rows=len(self.bad),
            bad_examples=tuple(self.bad[:SHOWN]),
            template_end=self.template_end,
            truncated_prompts=self.truncated_prompts,
            truncated_completions=self.truncated_completions,
            prompt_tokens=Lengths.of(self.prompt_lengths),
            completion_tokens=Lengths.of(self.completion_lengths),
            trained_tokens=self.trained_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source: read = kept + dropped + bad rows. Lengths are those after truncation, of what was kept."""

    source: str
    role: str
    """"train" or "validation"."""
    dialects: Mapping[str, int]
    """Rows by the dialect they were read in."""
    unread: Mapping[str, int]
    """Columns that hold something and are not used, with the number of such rows; prompts keep theirs for rewards."""
    read: int
    kept: int
    """Records that became items: prompts, with all their pairs, or chats, with all their trained turns."""
    rows: int
    """Token rows made of them: two for each pair, one for each trained turn."""
    pairs: int
    pairs_dropped: Mapping[str, int]
    turns_dropped: Mapping[str, int]
    """Assistant turns of chats of which others were kept (`data.every_turn`)."""
    dropped: Mapping[str, int]
    """Records left out, by reason."""
    bad_rows: int
    bad_examples: tuple[str, ...]
    """The first few bad rows: where and why."""
    template_end: str
    truncated_prompts: int
    truncated_completions: int
    prompt_tokens: Lengths
    completion_tokens: Lengths
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """All sources of a run."""

    kind: str
    """"demonstrations", "preferences" or "prompts"."""
    sources: tuple[SourceReport, ...]
    train_items: int
    validation_items: int

    def json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return asdict(self)

    def table(self, *, measured: bool = False) -> str:
        """Lines for a terminal: a table of the sources, then whatever was left out or cut, with its reason. What is
        `measured` on is trained on by nobody."""
        head = ("source", "", "read", "kept", "cut", "dropped", "bad", "prompt p5/p50/p95/max", "answer p5/p50/p95/max")
        use = "to measure on" if measured else f"to train on, {self.validation_items:,} for validation"
        lines = [f"{self.kind}: {self.train_items:,} {use}"]
        sources = [replace(source, role="", trained_tokens=0) if measured else source for source in self.sources]
        lines += _aligned([head, *map(_cells, sources)])
        for source in sources:
            lines += [f"  {source.source}: {note}" for note in _notes(source)]
        return "\n".join(lines)


def _cells(source: SourceReport) -> tuple[str, ...]:
    return (
        source.source,
        source.role,
        f"{source.read:,}",
        f"{source.kept:,}",
        f"{source.truncated_prompts + source.truncated_completions:,}",
        f"{sum(source.dropped.values()):,}",
        f"{source.bad_rows:,}",
        _spread(source.prompt_tokens),
        _spread(source.completion_tokens),
    )


def _spread(lengths: Lengths) -> str:
    return f"{lengths.p5}/{lengths.p50}/{lengths.p95}/{lengths.max}" if lengths.count else "-"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _notes(source: SourceReport) -> list[str]:
    notes = [f"read as {name}: {count:,}" for name, count in source.dialects.items()]
    if source.unread:
        more = f" and {len(source.unread) - SHOWN:,} more" if len(source.unread) > SHOWN else ""
        notes.append(f"columns not read: {', '.join([*source.unread][:SHOWN])}{more}")
    if source.pairs or source.pairs_dropped:
        notes.append(f"pairs: {source.pairs:,}")
    if source.trained_tokens:
        notes.append(f"trained tokens: {source.trained_tokens:,}")
    notes += [f"pairs left out, {reason}: {count:,}" for reason, count in source.pairs_dropped.items()]
    if source.template_end and source.trained_tokens:
        notes.append(
            f"answers end with the tokenizer's eos_token, the chat template ends them with {source.template_end!r}"
        )
    if source.kept < source.rows and not source.pairs:
        notes.append(f"assistant turns: {source.rows:,}")
    notes += [f"turns left out, {reason}: {count:,}" for reason, count in source.turns_dropped.items()]
    notes += [f"dropped, {reason}: {count:,}" for reason, count in source.dropped.items()]
    if source.truncated_prompts:
        notes.append(f"prompts that lost their beginning: {source.truncated_prompts:,}")
    if source.truncated_completions:
        notes.append(f"answers that lost their end: {source.truncated_completions:,}")
    notes += [f"bad row {example}" for example in source.bad_examples]
    if source.bad_rows > len(source.bad_examples):
        notes.append(f"and {source.bad_rows - len(source.bad_examples):,} more bad rows")
    return notes
