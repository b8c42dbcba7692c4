"""Gather rows of a tensor, with gradients that are summed without writing a row twice.

Torch's backward pass of a gather zeroes a tensor and adds row after row. On the CPU this is five times as slow as the
sums of bags here (each row of the source is a bag of its reads); on CUDA its order is not fixed.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Reading:
    """An index (m,) into `rows` rows, kept on `device` (default: the index's device).

    `real` (m,) marks the reads that have a gradient; the gradients of the other reads are known to be zero.
    """

    def __init__(
        self, index: Tensor, rows: int, *, real: Tensor | None = None, device: torch.device | str | None = None
    ):
        self.rows, self.device = rows, device or index.device
        self.index = index.to(self.device)
        self._source, self._real = index, real

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """Return the reads sorted by the row that they read, (m,), and the offset of each row's first read in them,
        (rows,). Only backward passes need them."""
        everything = torch.arange(len(self._source), device=self._source.device)
        places = everything if self._real is None else self._real.nonzero()[:, 0]
        found, order = self._source[places].sort(stable=True)
        counts = torch.bincount(found, minlength=self.rows)
        return places[order].to(self.device), (counts.cumsum(0) - counts).to(self.device)


def gathered(x: Tensor, reading: Reading) -> Tensor:
    """Return the rows of x (rows, ...) at the reading's index, (m, ...)."""
    return _Gather.apply(x, reading)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reading: Reading) -> Tensor:
        ctx.reading = reading
        return x.index_select(0, reading.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        reads, starts = ctx.reading.bags
        # Not F.embedding_bag, whose checks of arguments take long.
        bag = torch.ops.aten._embedding_bag_forward_only
        flat = grad.flatten(1)
        summed: Tensor = bag(flat, reads, starts, False, 0, False, None, False, -1)[0]
        return summed.view(ctx.reading.rows, *grad.shape[1:]), None
