"""From settings to a data set ready to be drawn from, with its report: the one entrance to this package.

    sources -> rows -> records -> token rows -> Dataset(items, validation, report)

Everything is held in memory as tuples of token ids. Leaves out drawing (`cursor.py`) and batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from plaudit.data.cursor import Cursor, permutation
from plaudit.data.fields import DataError, blank
from plaudit.data.formats import (
    DEMONSTRATION,
    PREFERENCE,
    QUESTION,
    Demonstration,
    Preference,
    Question,
    Sample,
    check_columns,
    check_found,
    demonstration_of,
    found,
    named,
    preference_of,
    question_of,
    sample,
)
from plaudit.data.read import scan_rows
from plaudit.data.report import Budget, DataReport, Tally
from plaudit.data.settings import DataSettings, sources
from plaudit.data.tokenize import Tokens, demonstration_rows, preference_rows, prompts
from plaudit.types import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")
RecordT = TypeVar("RecordT")
VALIDATION_SPLIT = 2
"""Key of the random stream that picks validation items; 0 and 1 are the cursor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Generic[ItemT]):
    """What a run trains on and validates with. An item is what `batch_size` counts: one prompt.

    An item of demonstrations is `(row,)`; of preferences all rows of a prompt, chosen and rejected adjacent; of
    prompts the `Prompt` itself.
    """

    items: list[ItemT]
    validation: list[ItemT]
    report: DataReport
    counts: tuple[int, ...]
    """Train items of each source; `items` holds the sources one after the other."""
    weights: tuple[float, ...] | None
    shuffle: bool

    def cursor(self, seed: int) -> Cursor:
        """The order in which `items` are drawn."""
        return Cursor(self.counts, weights=self.weights, seed=seed, shuffle=self.shuffle)


def load_demonstrations(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Dataset[tuple[Row, ...]]:
    """Rows to imitate."""
    _check_room(settings)

    def tokenised(records: Sequence[Demonstration], tally: Tally, first: int) -> list[tuple[Row, ...]]:
        rows = demonstration_rows(records, tokenizer, settings, tally=tally, first_group=first)
        return [tuple(turns) for _, turns in groupby(rows, key=lambda row: row.group)]

    return _load(settings, seed, Stage(DEMONSTRATION, demonstration_of, tokenised, _asked))


def load_preferences(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset[tuple[Row, ...]]:
    """Pairs of answers, by prompt."""
    _check_room(settings)

    def tokenised(records: Sequence[Preference], tally: Tally, first: int) -> list[tuple[Row, ...]]:
        rows = preference_rows(records, tokenizer, settings, tally=tally, first_group=first)
        return [tuple(pairs) for _, pairs in groupby(rows, key=lambda row: row.group)]

    return _load(settings, seed, Stage(PREFERENCE, preference_of, tokenised, _asked))


def load_prompts(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset[Prompt]:
    """Prompts to answer."""

    def tokenised(records: Sequence[Question], tally: Tally, first: int) -> list[Prompt]:
        return prompts(records, tokenizer, settings, tally=tally)

    return _load(settings, seed, Stage(QUESTION, question_of, tokenised, attrgetter("tokens")))


@dataclass(frozen=True, slots=True)
class Stage(Generic[RecordT, ItemT]):
    """What differs between the three kinds of data: the record read off a sample, the items made of records, and the
    prompt of an item."""

    kind: str
    record: Callable[[Sample], RecordT]
    items: Callable[[Sequence[RecordT], Tally, int], list[ItemT]]
    prompt: Callable[[ItemT], Tokens]


def _load(settings: DataSettings, seed: int, stage: Stage[RecordT, ItemT]) -> Dataset[ItemT]:
    settings.check()
    check_columns(settings.columns)
    if settings.dialect != "auto":
        named(settings.dialect)
    tallies: list[Tally] = []
    budget = Budget(settings.bad_rows)

    def items_of(source: str, role: str, first: int) -> list[ItemT]:
        tallies.append(Tally(source=source, role=role, budget=budget))
        return stage.items(_records(tallies[-1], settings, stage), tallies[-1], first)

    train: list[ItemT] = []
    validation: list[ItemT] = []
    counts: list[int] = []
    for index, source in enumerate(sources(settings.train)):
        items = items_of(source, "train", len(train) + len(validation))
        kept, apart = _split(items, settings.validation_percent, (seed, index), stage.prompt)
        if not kept:
            raise DataError(_nothing_left(stage.kind, tallies[-1], held_out=len(apart)), source)
        train += kept
        validation += apart
        counts.append(len(kept))
    for source in sources(settings.validation):
        items = items_of(source, "validation", len(train) + len(validation))
        if not items:
            raise DataError(_nothing_left(stage.kind, tallies[-1]), source)
        validation += items
    check_found(settings.columns, {ours for tally in tallies for ours in tally.renamed}, stage.kind)
    report = DataReport(
        kind=stage.kind,
        sources=tuple(tally.freeze() for tally in tallies),
        train_items=len(train),
        validation_items=len(validation),
    )
    weights = None if settings.weights is None else tuple(settings.weights)
    if weights is not None:
        _check_shares(counts, weights, sources(settings.train))
    return Dataset(
        items=train,
        validation=validation,
        report=report,
        counts=tuple(counts),
        weights=weights,
        shuffle=settings.shuffle,
    )


def _records(tally: Tally, settings: DataSettings, stage: Stage[RecordT, ItemT]) -> list[RecordT]:
    """Read the source of a tally."""
    split = settings.split if tally.role == "train" else settings.validation_split
    entered = {theirs.partition(".")[0] for theirs in settings.columns.values()}
    records: list[RecordT] = []
    for where, row in scan_rows(tally.source, split=split):
        if settings.limit is not None and len(records) == settings.limit:
            break
        tally.read += 1
        try:
            if isinstance(row, DataError):
                raise row
            tally.renamed.update(ours for ours, theirs in settings.columns.items() if found(row, theirs))
            read, dialect = sample(
                row, kind=stage.kind, where=where, dialect=settings.dialect, columns=settings.columns
            )
            records.append(stage.record(read))
        except DataError as error:
            tally.skip(error)
        else:
            tally.dialects[dialect] += 1
            if stage.kind != QUESTION:
                said = (name for name, value in read.extra.items() if not hasattr(value, "__len__") or not blank(value))
                tally.unread.update(name for name in said if name not in entered)
    return records


def _split(
    items: list[ItemT], percent: float, key: tuple[int, ...], prompt: Callable[[ItemT], Tokens]
) -> tuple[list[ItemT], list[ItemT]]:
    """Items to train on and items set aside, both in the order of the source, and no prompt in both.

    Where each prompt has too many items for that (plain texts have none, all of them) each item stands for itself.
    """
    count = round(len(items) * percent / 100)
    if percent > 0 and len(items) > 1:
        count = max(count, 1)
    if count == 0:
        return items, []
    of_prompt: dict[object, list[int]] = {}
    for i, item in enumerate(items):
        asked = prompt(item)
        of_prompt.setdefault(asked if len(asked) > 1 else i, []).append(i)
    groups = list(of_prompt.values())
    if min(map(len, groups)) > count:
        groups = [[i] for i in range(len(items))]
    apart: set[int] = set()
    for i in permutation(len(groups), VALIDATION_SPLIT, *key):
        if len(apart) + len(groups[i]) <= count:
            apart.update(groups[i])
    return [item for i, item in enumerate(items) if i not in apart], [items[i] for i in sorted(apart)]


def _asked(item: tuple[Row, ...]) -> Tokens:
    return item[0].tokens[: item[0].trainable.index(True)]


def _check_shares(counts: Sequence[int], weights: tuple[float, ...], names: Sequence[str]) -> None:
    """An epoch's share of a source is the same whole number every time: with 0 it would never be drawn from."""
    quotas = Cursor(counts, weights=weights).quotas
    if quotas is not None and 0 in quotas:
        raise DataError(
            f"data.weights={list(weights)} leave it none of the {sum(counts):,} rows of an epoch. Raise its weight, or "
            "leave it out.",
            names[quotas.index(0)],
        )


def _nothing_left(kind: str, tally: Tally, *, held_out: int = 0) -> str:
    reasons = [f"{count} dropped ({reason})" for reason, count in tally.dropped.items()]
    reasons += [f"{count} pairs left out ({reason})" for reason, count in tally.pairs_dropped.items()]
    if tally.bad:
        reasons.append(f"{len(tally.bad)} bad, the first: {tally.bad[0]}")
    if held_out:
        reasons.append(f"{held_out} set aside for validation")
    return f"no {kind} are left of {tally.read} rows: {'; '.join(reasons) or 'all were empty'}."


def _check_room(settings: DataSettings) -> None:
    if settings.max_prompt_tokens >= settings.max_tokens:
        raise ValueError(
            f"data.max_prompt_tokens={settings.max_prompt_tokens} leaves no room for an answer within "
            f"data.max_tokens={settings.max_tokens}, which counts prompt and answer together. Lower the first."
        )
