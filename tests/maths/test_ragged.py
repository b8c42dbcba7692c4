"""Rows of unequal length that lie end to end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.maths.ragged import from_grid, last_in_row, row_mean, row_sum, to_grid

# Rows: [1 2 4] [8] [16 32]; masked in: 2 4 | - | 16
X = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
ROW = torch.tensor([0, 0, 0, 1, 2, 2])
MASK = torch.tensor([False, True, True, False, True, False])


def test_sums_and_means_by_hand() -> None:
    assert row_sum(X, ROW, 3).tolist() == [7.0, 8.0, 48.0]
    assert row_mean(X, MASK, ROW, 3).tolist() == [3.0, 0.0, 16.0]  # (2 + 4) / 2, nothing, 16


def test_a_sum_knows_rows_without_entries() -> None:
    assert row_sum(X, ROW, 4).tolist() == [7.0, 8.0, 48.0, 0.0]


def test_last_masked_entry_by_hand() -> None:
    assert last_in_row(MASK, ROW, 3).tolist() == [2, -1, 4]


def test_grid_by_hand() -> None:
    grid, place = to_grid(X, MASK, ROW, 3)
    assert grid.tolist() == [[2.0, 4.0], [0.0, 0.0], [16.0, 0.0]]
    assert place.tolist() == [-1, 0, 1, -1, 4, -1]
    assert from_grid(grid, place).tolist() == [0.0, 2.0, 4.0, 0.0, 16.0, 0.0]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_grid_is_undone_and_keeps_the_order_within_rows(rows: list[list[bool]]) -> None:
    mask = torch.tensor([on for row in rows for on in row])
    row = torch.tensor([number for number, entries in enumerate(rows) for _ in entries])
    x = torch.arange(1.0, len(mask) + 1)
    grid, place = to_grid(x, mask, row, len(rows))
    assert torch.equal(from_grid(grid, place), x * mask)
    for number, entries in enumerate(rows):
        mine = x[row == number][torch.tensor(entries)].tolist()
        assert grid[number].tolist() == mine + [0.0] * (grid.shape[1] - len(mine))
