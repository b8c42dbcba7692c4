"""Which units of a batch go together, on a rank or in a pass. Plain integers, no tensors.

    the batch's units, in order -> spread -> for each rank, the numbers of its units
                                -> passes -> for each pass, the numbers of its units

A unit is one row, or adjacent rows that are never separated. Results are sums of weighted terms, so the partition
changes their speed, not their value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """The sizes of a unit, in tokens."""

    group: int
    """Number of the unit's prompt; rows with one prompt share it."""
    tokens: int
    """Tokens of all rows of the unit."""
    prompt: int
    """Tokens before the first trained one of its first row; the whole row if none is trained."""
    first: int
    """Tokens of its first row."""
    rows: int


def by_group(units: Sequence[Unit], order: Iterable[int]) -> dict[int, list[int]]:
    """Return {group: its units' indices}, groups and units in the given order."""
    members: dict[int, list[int]] = {}
    for number in order:
        members.setdefault(units[number].group, []).append(number)
    return members


def spread(units: Sequence[Unit], world: int) -> list[list[int]]:
    """Return the units of each rank: every world-th, which spreads lengths evenly. Ranks take whole prompts instead if
    the busiest rank then has less to compute, since a rank computes a prompt once for all of its answers."""
    members = by_group(units, range(len(units)))
    interleaved = [list(range(rank, len(units), world)) for rank in range(world)]
    if not world <= len(members) < len(units):
        return interleaved

    def computed(part: Sequence[int]) -> int:
        """Return the number of tokens that a rank computes for these units, each prompt once."""
        once = {units[number].group: units[number].prompt for number in part}
        return sum(units[number].tokens - units[number].prompt for number in part) + sum(once.values())

    whole: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for group in sorted(members, key=lambda group: (-computed(members[group]), group)):
        rank = load.index(min(load))
        whole[rank] += members[group]
        load[rank] += computed(members[group])
    return [sorted(part) for part in whole] if max(load) < max(map(computed, interleaved)) else interleaved


def passes(units: Sequence[Unit], order: Iterable[int], token_budget: int, *, once: bool) -> list[list[int]]:
    """Cut the order into runs of at most `token_budget` tokens; a larger unit is a run of its own. With `once`, a
    prompt counts only in the first of its rows in a run."""
    runs: list[list[int]] = [[]]
    used = 0
    for number in order:
        unit = units[number]
        shared = unit.prompt if once and unit.prompt < unit.first else 0
        opening = unit.tokens - shared * (unit.rows - 1)
        joins = bool(runs[-1]) and units[runs[-1][-1]].group == unit.group
        size = opening - shared if joins else opening
        if runs[-1] and used + size > token_budget:
            runs.append([])
            used, size = 0, opening
        runs[-1].append(number)
        used += size
    return runs
