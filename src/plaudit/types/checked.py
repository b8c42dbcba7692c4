"""What rows must be to become a batch.

Row, ... -> check_rows -> None, or ValueError with the first that is wrong
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.types import Row


def check_rows(rows: Sequence[Row], unit: int) -> None:
    """Raise ValueError for no rows, a number of rows that is no multiple of `unit`, a column of another length, or a
    first token that is trained."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    if len(rows) % unit:
        raise ValueError(f"{len(rows)} rows cannot be kept in units of {unit}")
    for number, row in enumerate(rows):
        _check(number, row, rows[0])


def _check(number: int, row: Row, first: Row) -> None:
    size = len(row.tokens)
    if size == 0:
        raise ValueError(f"row {number} has no tokens: give it at least one")
    for (name, column), other in zip(_by_token(row).items(), _by_token(first).values(), strict=True):
        if column is not None and len(column) != size:
            raise ValueError(f"row {number}: {name} has {len(column)} entries for {size} tokens: give one a token")
        if (column is None) != (other is None):
            has, lacks = (0, number) if column is None else (number, 0)
            raise ValueError(f"row {has} has {name} and row {lacks} has none: give them to every row or to none")
    if row.trainable[0]:
        raise ValueError(f"row {number}: its first token is trained, but nothing precedes it; put a BOS before it")


def _by_token(row: Row) -> Mapping[str, Sequence[Any] | None]:
    optional = {"logprobs": row.logprobs, "versions": row.versions, "reference": row.reference}
    return {"trainable": row.trainable, **optional}
