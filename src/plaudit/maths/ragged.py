"""Sums and layouts over rows of unequal length that lie end to end."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the sum of x (n,) within each row, (rows,). `row` (n,) is the row number of each entry."""
    return torch.zeros(rows, dtype=x.dtype, device=x.device).index_add(0, row, x)


def row_mean(x: Tensor, mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the mean of x (n,) over each row's entries where `mask` is True, (rows,); 0 for a row without any."""
    mask = mask.to(x.dtype)
    return row_sum(x * mask, row, rows) / row_sum(mask, row, rows).clamp(min=1.0)


def last_in_row(mask: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the index in (n,) of each row's last entry where `mask` is True, (rows,); -1 for a row without any."""
    index = torch.arange(mask.shape[0], device=mask.device).masked_fill(~mask, -1)
    last = torch.full((rows,), -1, dtype=torch.int64, device=mask.device)
    return last.scatter_reduce(0, row, index, reduce="amax")


def to_grid(x: Tensor, mask: Tensor, row: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return a grid (rows, longest) and `place` (n,), each entry's flat index in the grid.

    The grid has each row's entries where `mask` is True, without gaps, padded with 0; elsewhere `place` is -1.
    """
    counts = row_sum(mask.to(torch.int64), row, rows)
    width = int(counts.max()) if rows else 0
    rank = mask.to(torch.int64).cumsum(0) - 1
    rank = rank - (counts.cumsum(0) - counts)[row]
    place = torch.where(mask, row * width + rank, -1)
    grid = torch.zeros(rows * width, dtype=x.dtype, device=x.device)
    grid[place[mask]] = x[mask]
    return grid.view(rows, width), place


def from_grid(grid: Tensor, place: Tensor) -> Tensor:
    """Return (n,): the grid's entry at each `place`, as the inverse of `to_grid`; 0 where its mask was False."""
    on = place >= 0
    flat = torch.zeros(place.shape[0], dtype=grid.dtype, device=grid.device)
    flat[on] = grid.reshape(-1)[place[on]]
    return flat
