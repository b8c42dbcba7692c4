"""From data settings to a `Dataset` and its report: the entrance to this package.

    sources -> rows -> records -> token rows -> Dataset(items, validation, report)

Rows pass one by one; only their tokens are kept (`store.py`). Leaves out drawing (`cursor.py`) and batching.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from plaudit.data.cursor import Cursor, permutation
from plaudit.data.fields import TEMPLATE_COLUMNS, DataError, blank
from plaudit.data.formats import (
    check_columns,
    check_found,
    demonstration_of,
    found,
    judgement_of,
    named,
    preference_of,
    sample,
)
from plaudit.data.oasst import unfolded
from plaudit.data.oddities import note_keys, note_row, note_same_files
from plaudit.data.read import scan_rows
from plaudit.data.reader import Reader, Refers, Tokens, parts_of
from plaudit.data.records import DEMONSTRATION, JUDGEMENT, PREFERENCE, QUESTION, Sample
from plaudit.data.report import Budget, DataReport, Parts, SourceReport, Tally
from plaudit.data.settings import DataSettings, unfed
from plaudit.data.store import AT_ONCE, Codec, Integers, Items, PromptItems, RowItems, Writer
from plaudit.data.stream import InOrder, Stream
from plaudit.data.tokenize import demonstration_rows, judgement_rows, preference_rows, prompts
from plaudit.support.fields import check
from plaudit.types import Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")
VALIDATION_SPLIT = 2
"""Key of the random stream that picks validation items; 0 and 1 are the cursor's."""
SHOWN = 3
"""Number of items of a preview that are shown as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Generic[ItemT]):
    """The data that a run trains on and validates with. An item is what `batch_size` counts: one prompt.

    - demonstrations: `(row,)`, or the rows of a chat's turns
    - preferences: all rows of a prompt, chosen and rejected adjacent
    - judgements: all rows of a prompt, each judged answer before its mismatched row
    - prompts: the `Prompt` itself
    """

    items: Items[ItemT] | Stream[ItemT]
    validation: Items[ItemT]
    report: DataReport
    counts: tuple[int, ...]
    """Number of train items of each source; `items` holds the sources' items in this order."""
    weights: tuple[float, ...] | None
    shuffle: bool
    longest: int
    """Tokens of the longest row, or of the longest prompt."""

    def cursor(self, seed: int) -> Cursor:
        """Return the order in which `items` are drawn."""
        if isinstance(self.items, Stream):
            return InOrder()
        return Cursor(self.counts, weights=self.weights, seed=seed, shuffle=self.shuffle)


RowsOf = Callable[[Sequence[Sample], Reader, Tally, int], list[Row]]


@dataclass(frozen=True, slots=True)
class Loader(Generic[ItemT]):
    """Reads one kind of data (demonstrations, preferences, judgements or prompts); fields hold what differs."""

    kind: str
    record: Callable[[Sample], Sample]
    items: Callable[[Sequence[Sample], Reader, Tally, int], list[ItemT]]
    """Makes items of records; the last argument is the number of the first item."""
    prompt: Callable[[ItemT], Tokens]
    rows: Callable[[ItemT], Sequence[Row | Prompt]]
    size: Callable[[ItemT], int]
    """Tokens of an item's longest row, or of its prompt."""
    codec: Callable[[], Codec[ItemT]]

    def __call__(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        ends: Collection[int] = (),
        refers: Refers = bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Dataset[ItemT]:
        """Read the sources that the settings name. `ends`, `tools`: as for `Chats`. For prompts, `refers` checks
        each row's reference answer; if it raises ValueError, the row is a bad row."""
        reader = self.reader(settings, tokenizer, ends, tools)
        reader.refers = refers
        return (_streamed if settings.stream else _stored)(reader, seed, self)

    def reader(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reader:
        """Return the reader for these settings. Raises ValueError if this kind of data cannot be read with them."""
        check(settings, unfed, prefix="data.")
        if self.kind != QUESTION and settings.max_prompt_tokens >= settings.max_tokens:
            raise ValueError(
                f"data.max_prompt_tokens={settings.max_prompt_tokens} leaves no room for an answer within "
                f"data.max_tokens={settings.max_tokens}, which counts prompt and answer together. Lower the first."
            )
        check_columns(settings.columns)
        if settings.dialect != "auto":
            named(settings.dialect)
        return Reader(tokenizer, settings, ends, tools)


def _of_rows(kind: str, record: Callable[[Sample], Sample], rows_of: RowsOf) -> Loader[tuple[Row, ...]]:
    """Return a loader whose items are the rows of a group."""

    def items(records: Sequence[Sample], reader: Reader, tally: Tally, first: int) -> list[tuple[Row, ...]]:
        return [tuple(rows) for _, rows in groupby(rows_of(records, reader, tally, first), key=attrgetter("group"))]

    def prompt(item: tuple[Row, ...]) -> Tokens:
        return tuple(item[0].tokens[: item[0].trainable.index(True)])

    def size(item: tuple[Row, ...]) -> int:
        return max(len(row.tokens) for row in item)

    return Loader(kind, record, items, prompt, tuple, size, RowItems)


load_demonstrations = _of_rows(DEMONSTRATION, demonstration_of, demonstration_rows)
load_preferences = _of_rows(PREFERENCE, preference_of, preference_rows)
load_judgements = _of_rows(JUDGEMENT, judgement_of, judgement_rows)
load_prompts: Loader[Prompt] = Loader(
    QUESTION,
    record=lambda read: read,
    items=lambda records, reader, tally, first: prompts(records, reader, tally),
    prompt=attrgetter("tokens"),
    rows=lambda prompt: (prompt,),
    size=lambda prompt: len(prompt.tokens),
    codec=PromptItems,
)
LOADERS: Mapping[str, Loader[Any]] = {
    loader.kind: loader for loader in (load_demonstrations, load_preferences, load_judgements, load_prompts)
}


def _stored(reader: Reader, seed: int, loader: Loader[ItemT]) -> Dataset[ItemT]:
    settings = reader.settings
    tallies: list[Tally] = []
    budget = Budget(settings.bad_rows)
    writer = Writer(loader.codec())
    read: list[tuple[int, int, array[int]]] = []
    longest = 0
    roles = [("train", source) for source in settings.fed]
    roles += [("validation", source) for source in settings.apart]
    for role, source in roles:
        tally = Tally(source=source, role=role, budget=budget)
        tallies.append(tally)
        first = writer.count
        divided = role == "train" and bool(settings.percent or settings.prompts)
        keys = array("q")
        for items in _items(reader, loader, tally, first):
            writer.add(items)
            longest = max(longest, *map(loader.size, items), 0)
            if divided:
                keys.extend([_prompt_key(loader.prompt(item), len(keys) + i) for i, item in enumerate(items)])
        if writer.count == first:
            raise DataError(_nothing_left(loader.kind, tally), source)
        read.append((first, writer.count, keys))
    train: list[Integers] = []
    apart: list[Integers] = []
    percent = settings.percent or 100 * settings.prompts / max(sum(len(keys) for _, _, keys in read), 1)
    for index, (tally, (first, last, keys)) in enumerate(zip(tallies, read, strict=True)):
        rows = np.arange(first, last)
        if keys:
            held_out = _held_out(np.frombuffer(keys, np.int64), percent, (seed, index))
            apart.append(rows[held_out])
            rows = rows[~held_out]
        if not len(rows):
            raise DataError(_nothing_left(loader.kind, tally, held_out=last - first), tally.source)
        (train if tally.role == "train" else apart).append(rows)
    note_same_files(settings, tallies)
    check_found(settings.columns, {ours for tally in tallies for ours in tally.renamed}, loader.kind)
    counts = tuple(map(len, train))
    weights = settings.weights
    if weights is not None:
        _check_shares(counts, weights, settings.fed)
    stored = writer.items()
    return Dataset(
        items=stored.picked(np.concatenate(train)),
        validation=stored.picked(np.concatenate([np.arange(0), *apart])),
        report=DataReport(
            kind=loader.kind,
            sources=tuple(tally.freeze() for tally in tallies),
            train_items=sum(counts),
            validation_items=sum(map(len, apart)),
        ),
        counts=counts,
        weights=weights,
        shuffle=settings.shuffle,
        longest=longest,
    )


def _streamed(reader: Reader, seed: int, loader: Loader[ItemT]) -> Dataset[ItemT]:
    """Return train sources as a stream, whose first block is read now. Validation sources are read and stored whole."""
    settings = reader.settings
    tallies: list[Tally] = []

    def read() -> Iterator[ItemT]:
        tallies.clear()
        budget, first = Budget(settings.bad_rows), 0
        for source in settings.fed:
            tallies.append(Tally(source=source, budget=budget))
            for items in _items(reader, loader, tallies[-1], first):
                first += len(items)
                yield from items

    codec = loader.codec()
    stream = Stream(read, codec, block=settings.stream, seed=seed, shuffle=settings.shuffle)
    reports: list[SourceReport] = [tally.freeze() for tally in tallies]
    held: Items[ItemT] = Items(codec, (), ())
    if settings.apart:
        apart = {"train": settings.validation, "split": settings.validation_split, "validation": None, "stream": 0}
        other = loader(replace(settings, **apart), reader.tokenizer, seed, reader.ends, reader.refers)
        assert isinstance(other.items, Items)
        held = other.items
        reports += [replace(source, role="validation") for source in other.report.sources]
    return Dataset(
        items=stream,
        validation=held,
        report=DataReport(
            kind=loader.kind, sources=tuple(reports), train_items=0, validation_items=len(held), streamed=True
        ),
        counts=(),
        weights=None,
        shuffle=settings.shuffle,
        longest=settings.max_prompt_tokens if loader.kind == QUESTION else settings.max_tokens,
    )


def _items(reader: Reader, loader: Loader[ItemT], tally: Tally, first: int) -> Iterator[list[ItemT]]:
    """Yield the items of a tally's source, a list at a time; `first` is the number of the first item."""
    records = _records(tally, reader.settings, loader)
    while some := list(islice(records, AT_ONCE)):
        items = loader.items(some, reader, tally, first)
        if items and not tally.example:
            tally.example = parts_of(loader.rows(items[0])[0], reader.tokenizer)
        first += len(items)
        yield items


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The first rows of a source, as the model would read them."""

    report: SourceReport
    items: Sequence[Any]
    rows: tuple[tuple[Parts, ...], ...]
    """The first items: each one's rows, such as the chosen and the rejected one."""
    longest: int
    problem: str
    """Why the source cannot be used; "" if it can."""


def previewed(
    settings: DataSettings,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    *,
    rows: int,
    refers: Refers = bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Preview]:
    """Yield a preview of each source: its first good rows. A source that cannot be read has a `problem`. `refers` and
    `tools`: as for a `Loader`. Raises ValueError for settings that do not fit the kind of data."""
    loader = LOADERS[kind]
    some = replace(settings, train=settings.fed or settings.apart, limit=min(rows, settings.limit or rows))
    reader = loader.reader(replace(some, validation=None), tokenizer, ends, tools)
    reader.refers = refers
    for role, paths in (("train", settings.fed), ("validation", settings.apart)):
        for source in paths:
            tally = Tally(source=source, role=role, budget=Budget(rows))
            items: list[Any] = []
            problem = ""
            try:
                items = [item for some in _items(reader, loader, tally, 0) for item in some]
                problem = "" if items else _nothing_left(kind, tally)
            except (ValueError, OSError, ImportError) as error:
                none = f"none of {tally.read} rows can be read, the last: "
                problem = f"{none}{tally.bad[-1]}" if tally.bad else str(error)
            yield Preview(
                report=tally.freeze(),
                items=items,
                rows=tuple(tuple(parts_of(row, tokenizer) for row in loader.rows(item)[:2]) for item in items[:SHOWN]),
                longest=max(map(loader.size, items), default=0),
                problem=problem,
            )


def _records(tally: Tally, settings: DataSettings, loader: Loader[ItemT]) -> Iterator[Sample]:
    """Yield the good records of a tally's source, at most `data.limit`. Count rows, and skip bad ones in the budget."""
    split = settings.split_of(tally.source) if tally.role == "train" else settings.validation_split
    entered = {theirs.partition(".")[0] for theirs in settings.columns.values()}
    good = 0
    for where, row in unfolded(scan_rows(tally.source, split=split, note=tally.note), loader.kind, tally.note):
        if good == settings.limit:
            break
        tally.read += 1
        try:
            if isinstance(row, DataError):
                raise row
            tally.renamed.update(ours for ours, theirs in settings.columns.items() if found(row, theirs))
            read, dialect = sample(
                row, kind=loader.kind, where=where, dialect=settings.dialect, columns=settings.columns
            )
            record = loader.record(read)
        except DataError as error:
            tally.skip(error)
            continue
        good += 1
        tally.dialects[dialect] += 1
        note_row(read, record, loader.kind, settings, tally)
        note_keys(row, tally)
        if loader.kind != QUESTION:
            used = entered.union(TEMPLATE_COLUMNS if read.messages else ())
            said = (name for name, value in read.extra.items() if not isinstance(value, Sized) or not blank(value))
            tally.unread.update(name for name in said if name not in used)
        yield record


def _prompt_key(prompt: Tokens, number: int) -> int:
    """Return a key that is equal for equal prompts. A demonstration without a prompt (plain text: at most one token)
    gets a key of its own."""
    return hash(prompt if len(prompt) > 1 else (number, -1))


def _held_out(prompts: Integers, percent: float, key: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return a mask of the items to set aside, chosen by the keys of their prompts: no prompt is on both sides.

    If every prompt has more items than are to be set aside, single items are chosen. (All plain texts have the empty
    prompt.)
    """
    count = round(len(prompts) * percent / 100)
    if len(prompts) > 1:
        count = max(count, 1)
    _, firsts, group = np.unique(prompts, return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(firsts))[group]  # prompts numbered by first appearance
    sizes = np.bincount(group)
    if len(sizes) and sizes.min() > count:
        group, sizes = np.arange(len(prompts)), np.ones(len(prompts), np.int64)
    taken = np.zeros(len(sizes), np.bool_)
    for one in permutation(len(sizes), VALIDATION_SPLIT, *key):
        if count == 0:
            break
        if sizes[one] <= count:
            taken[one] = True
            count -= int(sizes[one])
    return taken[group]


def _check_shares(counts: Sequence[int], weights: tuple[float, ...], names: Sequence[str]) -> None:
    """Raise DataError if a source's share rounds to 0 draws an epoch, so that it would never be drawn from."""
    quotas = Cursor(counts, weights=weights).quotas
    if quotas is not None and 0 in quotas:
        raise DataError(
            f"the shares {list(weights)} in data.train leave it none of the {sum(counts):,} rows of an epoch. Raise "
            "its share, or leave it out.",
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
