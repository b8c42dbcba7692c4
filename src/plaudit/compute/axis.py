"""The tensor axis: ranks that hold parts of the same matrices, and put together what each computes.

    x -> enter -> rows of a matrix (heads, channels) -> ... -> columns of the next -> leave -> y, equal on all ranks

`enter` and `leave` (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053) are each other's backward pass: a gradient
is summed where its tensor was copied, and copied where its tensor was summed. So the loss, which every rank computes,
counts once. A rank without others passes everything through. Left out: groups of ranks, which `learn/ranks.py` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from plaudit.compute.fused import embed


@dataclass(frozen=True, eq=False)
class Axis:
    """A rank's place among `size` ranks."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model stays among the same ranks; a process group has no copy."""
        return self

    def enter(self, x: Tensor) -> Tensor:
        """x, of which each rank computes other columns; its gradient is the sum of the ranks'."""
        if self.size == 1 or not torch.is_grad_enabled():
            return x
        return _Enter.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x; each rank's gradient is the whole one."""
        if self.size == 1:
            return x
        if torch.is_grad_enabled():
            return _Leave.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.in_order(x)

    def in_order(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, added in rank order. Gloo's own order depends on a number's place among others, on
        which inference must not (`invariant.py`); two numbers have one order."""
        if self.size == 2:
            return self.sum(x)
        mine = self._sent(x)
        total, *parts = (torch.empty_like(mine) for _ in range(self.size))
        dist.all_gather([total, *parts], mine, group=self.group)
        for part in parts:
            total += part
        return total.to(x.device)

    def side_by_side(self, x: Tensor) -> Tensor:
        """The ranks' columns of a table (rows, columns), in rank order, at the first; others get their own."""
        if self.size == 1:
            return x
        mine = self._sent(x)
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(mine, parts or None, group=self.group, group_dst=0)
        return torch.cat(parts, dim=1).to(x.device) if parts else x

    def _sent(self, x: Tensor) -> Tensor:
        """x as it is gathered: gloo gathers tensors of CPUs only."""
        return x.contiguous().cpu() if dist.get_backend(self.group) == "gloo" else x.contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, as a new tensor with equal bits on each."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def most(self, x: Tensor) -> Tensor:
        """The largest of the ranks' numbers at each place."""
        largest = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def own(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Where these rows of a matrix are among the `rows` of this rank, 0 for others', and which are others'."""
        mine = ids - self.rank * rows
        others = (mine < 0) | (mine >= rows)
        return mine.masked_fill(others, 0), others

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of a matrix of which each rank has some, (tokens, width)."""
        if self.size == 1:
            return embed(tokens, weight)
        mine, others = self.own(tokens, len(weight))
        return self.leave(embed(mine, weight).masked_fill(others[:, None], 0.0))


ALONE = Axis()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
