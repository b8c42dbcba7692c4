"""Sequences that begin alike compute what they share once.

    rows -> the tokens to compute, and for each token of each row where it stands among them

A token's state depends on the tokens up to it alone, so the k answers to a prompt, or both of a pair, need the prompt
once in every product; attention sees whole rows as ever (`context.py`). Gradients change by the order of additions
alone. Left out: prefixes with a cache, which generation copies (`rollout/native.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def shared(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """The tokens to compute (c,), and an index into them for the rows laid end to end (n,), n >= c."""
    tokens: list[int] = []
    places: dict[int, list[int]] = {}
    row: list[int] = []
    own: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: rows[number]):  # those that begin alike are neighbours
        before, row = row, rows[number]
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, row, strict=False)))
        own = own[:common] + list(range(len(tokens), len(tokens) + len(row) - common))
        tokens.extend(row[common:])
        places[number] = own
    return tokens, [place for number in range(len(rows)) for place in places[number]]
