"""Compute the common beginning of sequences once.

    rows -> the tokens to compute, and for each token of each row its place among them

A token's state depends only on the tokens up to it. For the k answers to a prompt, or both answers of a pair, matrix
products therefore compute the prompt once; attention still sees whole rows (`compute/context.py`). Only the order of
additions in gradients changes. Left out: prefixes in a KV cache, which generation copies (`rollout/decode/table.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def shared(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Return the tokens to compute (c,), and for each token of the concatenated rows its index in them (n,), n >= c."""
    tokens: list[int] = []
    places: dict[int, list[int]] = {}
    row: list[int] = []
    own: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: rows[number]):  # rows that begin alike become neighbours
        before, row = row, rows[number]
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, row, strict=False)))
        own = own[:common] + list(range(len(tokens), len(tokens) + len(row) - common))
        tokens.extend(row[common:])
        places[number] = own
    return tokens, [place for number in range(len(rows)) for place in places[number]]
