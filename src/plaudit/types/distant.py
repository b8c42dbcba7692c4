"""Numbers of answers that stay where they were sampled until a rank fetches them.

    rollout worker: completions -> apart -> columns, which stay; texts, lengths and versions, which go to the driver
    driver: arrived -> completions of Distant numbers -> rows -> Batch: in place of a token, where it is
    ranks: Batch.landed -> tokens, log-probs and versions of their rows

The driver knows lengths, versions, texts and rewards. If it reads a number all the same (a recorded answer, a reward
function of tokens), it fetches it. Left out: what a reference is and how it is fetched (`runtime/ray_worker.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from plaudit.types import Completion, Numbers

LARGE = 1 << 17
"""Answers of a prompt that take at least this many bytes stay on their node: a reference costs the driver more than a
short group."""
BYTES = 12
"""Bytes of a token with its log-prob and version."""
STRIDE = 1 << 32
"""Distance between the index ranges of two sources: more than the tokens of one source."""

FETCHED = ("tokens", "behaviour", "version")
"""Columns of a batch whose numbers may still be on rollout nodes."""
Columns = Mapping[str, Any]
"""Columns of all answers to a prompt, laid end to end, as arrays."""
Told = list[tuple[Completion, list[tuple[int, int]]]]
"""Completions without versions, each with its versions as runs: (version, number of tokens)."""


class Source(Protocol):
    """A reference to the columns of a prompt's answers, on the node that sampled them."""

    def all(self, sources: Sequence[Any]) -> list[Columns]:
        """Fetch the columns of `sources`, which are of this class, at once. Raises WorkerLost if they are lost."""
        ...


class Distant(Sequence[Any]):
    """Numbers that are on another node: `start` to `stop` of a column of `source`, with known ones before and behind.
    Reading any of them fetches all."""

    __slots__ = ("before", "behind", "column", "source", "start", "stop")

    def __init__(
        self,
        column: str,
        start: int,
        stop: int,
        source: Source | None = None,
        before: Sequence[Any] = (),
        behind: Sequence[Any] = (),
    ):
        self.column, self.start, self.stop, self.source = column, start, stop, source
        self.before, self.behind = before, behind

    def __len__(self) -> int:
        return len(self.before) + self.stop - self.start + len(self.behind)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice) and not (self.before or self.behind):
            start, stop, step = place.indices(self.stop - self.start)
            if step == 1:
                return Distant(self.column, self.start + start, self.start + max(start, stop), self.source)
        return values([self])[0][place]

    def __iter__(self) -> Iterator[Any]:
        return iter(values([self])[0])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Distant, (self.column, self.start, self.stop, self.source, self.before, self.behind)

    def laid(self, middle: Any) -> Any:
        """Return one array: the known numbers before, `middle`, and the known numbers behind."""
        return np.concatenate([np.asarray(self.before, middle.dtype), middle, np.asarray(self.behind, middle.dtype)])


def joined(before: Sequence[Any], numbers: Sequence[Any], behind: Sequence[Any] = ()) -> Any:
    """Join numbers; those in the middle may be distant. If `before` is `Numbers`, it is extended and returned."""
    if isinstance(numbers, Distant):
        before = (*before, *numbers.before) if numbers.before else before
        behind = (*numbers.behind, *behind) if numbers.behind else behind
        return Distant(numbers.column, numbers.start, numbers.stop, numbers.source, before, behind)
    if isinstance(before, Numbers) and not behind:
        before.extend(numbers)
        return before
    return (*before, *numbers, *behind)


def values(sequences: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the sequences after fetching all distant numbers in one call."""
    sources = {id(one.source): one.source for one in sequences if isinstance(one, Distant) and one.start < one.stop}
    found = dict(zip(sources, _fetched(list(sources.values())), strict=True))

    def value(one: Sequence[Any]) -> tuple[Any, ...]:
        if not isinstance(one, Distant):
            return tuple(one)
        columns = found.get(id(one.source), {one.column: np.empty(0)})
        return (*one.before, *columns[one.column][one.start : one.stop].tolist(), *one.behind)

    return [value(one) for one in sequences]


def here(completions: Sequence[Completion]) -> Sequence[Completion]:
    """Return the completions after fetching all distant numbers in one call."""
    if not any(isinstance(one.tokens, Distant) for one in completions):
        return completions
    numbers = iter(values([column for one in completions for column in (one.tokens, one.logprobs)]))
    return [replace(one, tokens=next(numbers), logprobs=next(numbers)) for one in completions]


def _fetched(sources: Sequence[Source | None]) -> list[Columns]:
    known = [source for source in sources if source is not None]
    assert len(known) == len(sources), "`arrived` gives distant numbers their source"
    return known[0].all(known) if known else []


def apart(completions: Sequence[Completion], least: int) -> tuple[Columns | None, Told]:
    """Split completions into columns that stay on this node (None below `least` bytes) and what the driver gets."""
    lengths = [len(one.tokens) for one in completions]
    if BYTES * sum(lengths) < least:
        return None, [(one, []) for one in completions]
    columns = {
        "tokens": np.concatenate([np.asarray(one.tokens, np.int32) for one in completions]),
        "behaviour": np.concatenate([np.asarray(one.logprobs, np.float32) for one in completions]),
        "version": np.concatenate([np.asarray(one.versions, np.int32) for one in completions]),
    }
    listed: Told = []
    stop = 0
    for one, length in zip(completions, lengths, strict=True):
        start, stop = stop, stop + length
        versions = columns["version"][start:stop]
        begins = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
        runs = list(zip(versions[begins].tolist(), np.diff(begins, append=length).tolist(), strict=True))
        tokens, logprobs = Distant("tokens", start, stop), Distant("behaviour", start, stop)
        listed.append((replace(one, tokens=tokens, logprobs=logprobs, versions=()), runs))
    return columns, listed


def arrived(listed: Told, source: Source) -> list[Completion]:
    """Return completions from the second value of `apart`; `source` refers to their columns."""
    found = []
    for one, runs in listed:
        if isinstance(one.tokens, Distant) and isinstance(one.logprobs, Distant):
            one.tokens.source = one.logprobs.source = source
            versions = Numbers("i")
            for version, count in runs:
                versions.extend(array("i", [version]) * count)
            found.append(replace(one, versions=versions))
        else:
            found.append(one)
    return found


def laid(columns: Sequence[Sequence[Any]], kind: Any) -> tuple[Any, tuple[Source, ...]]:
    """Lay columns end to end, as an array. A distant token is a negative index, its place; other distant numbers are
    NaN. Return also the sources that the places refer to."""
    sources: dict[int, tuple[int, Any]] = {}
    parts = []
    for column in columns:
        if not isinstance(column, Distant):
            parts.append(np.asarray(column))
        elif column.column == "tokens":
            number, _ = sources.setdefault(id(column.source), (len(sources), column.source))
            parts.append(column.laid(-1 - STRIDE * number - np.arange(column.start, column.stop)))
        else:
            parts.append(column.laid(np.full(column.stop - column.start, np.nan, np.float32)))
    return np.concatenate(parts).astype(kind, copy=False), tuple(source for _, source in sources.values())


def landed(arrays: Mapping[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
    """Return the FETCHED columns of a batch after fetching their distant numbers. Raises WorkerLost."""
    tokens = arrays["tokens"]
    where = np.flatnonzero(tokens < 0)
    number, offset = np.divmod(-1 - tokens[where], STRIDE)
    used, which = np.unique(number, return_inverse=True)
    found = _fetched([sources[one] for one in used])
    sizes = [len(one["tokens"]) for one in found]
    index = (np.cumsum(sizes) - sizes)[which] + offset if found else offset
    whole = {name: arrays[name].copy() for name in FETCHED if name in arrays}
    for name, column in whole.items() if found else ():
        column[where] = np.concatenate([one[name] for one in found])[index]
    return whole


def packed(arrays: dict[str, Any], sources: Sequence[Source]) -> tuple[dict[str, Any], Any, list[Source]]:
    """Make a batch's arrays small: places of successive tokens become runs (first token, number of tokens, first
    place), and what belongs to them is left out of fetched columns. Return the sources still used, too."""
    tokens = arrays["tokens"]
    away = tokens < 0
    goes_on = np.zeros(len(tokens), bool)
    goes_on[1:] = away[1:] & away[:-1] & (tokens[1:] == tokens[:-1] - 1)
    begins = np.flatnonzero(away & ~goes_on)
    ends = np.flatnonzero(away & ~np.append(goes_on[1:], False)) + 1
    counts = ends - begins
    number, offset = np.divmod(-1 - tokens[begins], STRIDE)
    used, which = np.unique(number, return_inverse=True)
    runs = np.stack([begins, counts, -1 - (which * STRIDE + offset)])
    small = {name: one[~away] if name in FETCHED else one for name, one in arrays.items()}
    return small, runs, [sources[one] for one in used]


def unpacked(small: dict[str, Any], runs: Any) -> dict[str, Any]:
    """Undo `packed`: restore the places of distant tokens; their log-probs and versions are 0 until fetched."""
    begins, counts, places = runs
    size = len(small["tokens"]) + int(counts.sum())
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    where = np.repeat(begins, counts) + step
    here = np.ones(size, bool)
    here[where] = False
    found = dict(small)
    for name in FETCHED:
        if name in small:
            found[name] = np.zeros(size, small[name].dtype)
            found[name][here] = small[name]
    found["tokens"][where] = np.repeat(places, counts) - step
    return found
