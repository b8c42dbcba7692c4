"""Plan what ranks give each other so that one layout of a model becomes another. Plain data, without torch.

    Layout of the givers, Layout of the takers -> Moves, planned once -> Move: a box, from one rank to another

Ranks that hold the same box give equal parts of it, so that none is a bottleneck. Left out: how boxes travel
(`weights/`).
"""

from __future__ import annotations

import gc
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from plaudit.models.layout import Box, Layout
from plaudit.models.parts import numbered


class Move(NamedTuple):
    """A box of a stored tensor that rank `source` gives rank `target`, or keeps if both are the same."""

    name: str
    box: Box
    source: int
    target: int


class Moves:
    """The moves that turn layout `one` of a model into `other`. Raises ValueError for layouts of different models.

    Both layouts are of the same processes, and a rank keeps what it has. With `apart`, the second layout's ranks are
    other processes, such as rollout workers, and are given all of their boxes.
    """

    def __init__(self, one: Layout, other: Layout, *, apart: bool = False):
        if one.stored != other.stored:
            raise ValueError("The layouts are of different models: their stored tensors differ.")
        self.one, self.other, self.apart = one, other, apart

    @cached_property
    def alike(self) -> list[tuple[list[str], list[tuple[Box, int, int]]]]:
        """Return [(names of stored tensors, their moves as (box, source, target))]: tensors that move alike, such as
        the same weight of layers on the same stages, are in one group."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, part in self.one.parts.items():
            key = (numbered(name)[1], self.one.stages(part.ours), self.other.stages(part.ours))
            groups.setdefault(key, []).append(name)
        collects = gc.isenabled()
        gc.disable()  # else the garbage collector would visit millions of tuples repeatedly
        try:
            return [(names, list(self._sends(names[0]))) for names in groups.values()]
        finally:
            if collects:
                gc.enable()

    def __iter__(self) -> Iterator[Move]:
        for names, sends in self.alike:
            yield from (Move(name, *send) for name in names for send in sends)

    def sent_by(self, source: int) -> list[Move]:
        """Return the moves whose source is this rank, in the order of the stored tensors."""
        mine: dict[str, list[tuple[Box, int, int]]] = {}
        for names, sends in self.alike:
            own = [send for send in sends if send[1] == source]
            mine |= dict.fromkeys(names, own)
        return [Move(name, *send) for name in self.one.parts for send in mine[name]]

    def _sends(self, name: str) -> Iterator[tuple[Box, int, int]]:
        held, wanted = holders(self.one, name), holders(self.other, name)
        rows = sorted(held)
        largest = max(stop - start for (start, stop), *_ in rows)
        shares = {box: list(zip(ranks, parts(box, len(ranks)), strict=True)) for box, ranks in held.items()}
        for box, targets in wanted.items():
            (first, last), *_ = box
            low, high = (bisect(rows, edge, key=lambda theirs: theirs[0][0]) for edge in (first - largest, last - 1))
            for theirs in rows[low:high]:
                if (shared := overlap(theirs, box)) is None:
                    continue
                sources = [(source, both) for source, part in shares[theirs] if (both := overlap(part, shared))]
                for target in targets:
                    if not self.apart and target in held[theirs]:
                        yield shared, target, target
                    else:
                        yield from ((both, source, target) for source, both in sources)


def holders(layout: Layout, name: str) -> dict[Box, list[int]]:
    """Return the boxes of a stored tensor that ranks hold, each with the ranks that hold it."""
    ours, found = layout.parts[name].ours, dict[Box, list[int]]()
    stages = layout.stages(ours)
    for rank in range(layout.mesh.world):
        place = layout.mesh.place(rank)
        for held in layout.of(ours, place) if place.stage in stages else ():
            if held.name == name:
                found.setdefault(held.box, []).append(rank)
    return found


def parts(box: Box, count: int) -> list[Box]:
    """Cut a box along its longest side into `count` parts whose lengths differ by at most 1; some are empty if that
    side is shorter than `count`."""
    side = max(range(len(box)), key=lambda which: box[which][1] - box[which][0])
    start, stop = box[side]
    edges = [start + (stop - start) * part // count for part in range(count + 1)]
    return [(*box[:side], edge, *box[side + 1 :]) for edge in pairwise(edges)]


def overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Box | None:
    """Return the box that two boxes have in common; None if they share no number."""
    both = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d  # faster than max and min: called millions of times
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)
