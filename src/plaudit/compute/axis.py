"""An axis of ranks that share a pass: each has parts of the same matrices (tensor), or other tokens (context).

    tensor    x -> enter -> rows of a matrix (heads, channels) -> ... -> columns of the next -> leave -> y
    context   this rank's tokens, all heads -> to_heads -> all tokens, this rank's heads -> attention -> to_tokens

`enter` and `leave` (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053) are each other's backward pass: a gradient
is summed where its tensor was copied, and copied where its tensor was summed. So the loss, which every rank computes,
counts once. `to_heads` and `to_tokens` (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509) are each other's backward
pass too. On an axis of one rank, `enter` and `leave` return x unchanged. Left out: process groups (`learn/tensor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from plaudit.compute.fused import embed
from plaudit.compute.gather import Reading

RECOMPUTED = ContextVar("recomputed", default=False)
"""True within a layer under activation checkpointing, which is computed again in the backward pass."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A rank's place among the `size` ranks of an axis, and their collectives."""

    rank: int = 0
    size: int = 1
    group: Any = None
    spread: bool = False
    """True for sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): between matrices each
    rank has an equally long run of the rows. Otherwise all ranks have all rows there, and compute the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return self: a copied model communicates with the same ranks, and a process group cannot be copied."""
        return self

    def enter(self, x: Tensor) -> Tensor:
        """Return x before a product of which each rank computes other columns; with `spread`, all ranks' runs of x are
        gathered first. Backward sums the ranks' gradients."""
        if self.size == 1:
            return x
        return _through(x, self.joined, self.scattered) if self.spread else _through(x, _same, self.sum)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, or with `spread` this rank's run of it. Each rank gets the whole gradient."""
        if self.size == 1:
            return x
        if self.spread:
            return _through(x, self.scattered, self.joined)
        return _through(x, self.sum if torch.is_grad_enabled() else self.in_order, _same)

    @contextmanager
    def forgetting(self, whole: Tensor, mine: Tensor) -> Iterator[None]:
        """While active, autograd saves `mine`, this rank's run, in place of `whole`; backward gathers all runs."""
        if not self.spread or RECOMPUTED.get() or not torch.is_grad_enabled():
            yield
            return
        address, shape, mine = whole.data_ptr(), whole.shape, mine.detach()

        def pack(held: Tensor) -> Tensor:
            return mine if held.data_ptr() == address and held.shape == shape else held

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: self.joined(held) if held is mine else held):
            yield

    def together(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks' runs, joined; every rank computes the same from them."""
        return _through(x, self.joined, self.run) if self.spread else x

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange x (tokens, size, ...), whose part i is for rank i; return this rank's parts (size * tokens, ...)."""
        return _through(x, self._to_heads, self._to_tokens)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo `to_heads`: x (size * tokens, ...) has this rank's part of all tokens; return (tokens, size, ...)."""
        return _through(x, self._to_tokens, self._to_heads)

    def _to_heads(self, x: Tensor) -> Tensor:
        return self.exchanged(x.transpose(0, 1)).flatten(0, 1)

    def _to_tokens(self, x: Tensor) -> Tensor:
        return self.exchanged(x.reshape(self.size, -1, *x.shape[1:])).transpose(0, 1)

    @property
    def runs(self) -> int:
        """The number of runs into which rows between matrices are split: `size` with `spread`, else 1."""
        return self.size if self.spread else 1

    def run(self, x: Tensor) -> Tensor:
        """Return this rank's run of rows; all rows without `spread`."""
        return x.chunk(self.size)[self.rank] if self.spread else x

    def readings(self, read: Tensor, rows: int) -> tuple[Reading, Reading]:
        """Return two Readings of `read` (m,): among all `rows`, and among the rows of this rank's run. `read` has
        equally many entries for each run, in the order of the runs."""
        whole, least = Reading(read, rows), rows // self.size
        return whole, Reading(self.run(read) - self.rank * least, least) if self.spread else whole

    def joined(self, x: Tensor) -> Tensor:
        """All-gather the ranks' rows, in rank order."""
        mine = self._sent(x)
        whole = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        dist.all_gather(list(whole.chunk(self.size)), mine, group=self.group)
        return whole.to(x.device)

    def scattered(self, x: Tensor) -> Tensor:
        """Reduce-scatter: return this rank's run of the sum of the ranks' x, added in rank order."""
        parts = self.exchanged(x.reshape(self.size, -1, *x.shape[1:]))
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def exchanged(self, x: Tensor) -> Tensor:
        """All-to-all: send part i of x (size, ...) to rank i; part i of the result is what rank i sends this rank."""
        mine = self._sent(x)
        came = torch.empty_like(mine)
        dist.all_to_all_single(came, mine, group=self.group)
        return came.to(x.device)

    def in_order(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, added in rank order. Gloo's order depends on an element's place in x, and
        inference must not depend on it (`invariant.py`). With two ranks, any order gives the same sum."""
        if self.size == 2:
            return self.sum(x)
        mine = self._sent(x)
        total, *parts = (torch.empty_like(mine) for _ in range(self.size))
        dist.all_gather([total, *parts], mine, group=self.group)
        for part in parts:
            total += part
        return total.to(x.device)

    def side_by_side(self, x: Tensor) -> Tensor:
        """Return on rank 0 the ranks' tables (rows, columns), joined by columns in rank order; on other ranks x."""
        if self.size == 1:
            return x
        mine = self._sent(x)
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(mine, parts or None, group=self.group, group_dst=0)
        return torch.cat(parts, dim=1).to(x.device) if parts else x

    def _sent(self, x: Tensor) -> Tensor:
        """Return x contiguous, and on the CPU with gloo, which gathers only CPU tensors."""
        return x.contiguous().cpu() if dist.get_backend(self.group) == "gloo" else x.contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: return the sum of the ranks' x as a new tensor, with equal bits on each rank."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def most(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of the ranks' x as a new tensor."""
        largest = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def own(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return indices of `ids` among this rank's `rows` rows, and a mask of other ranks' ids (their index is 0)."""
        mine = ids - self.rank * rows
        others = (mine < 0) | (mine >= rows)
        return mine.masked_fill(others, 0), others

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the tokens' rows (tokens, width), with `spread` only this rank's run; `weight` is its part of all."""
        if self.size == 1:
            return embed(tokens, weight)
        mine, others = self.own(tokens, len(weight))
        return self.leave(embed(mine, weight).masked_fill(others[:, None], 0.0))


ALONE = Axis()


Move = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _through(x: Tensor, there: Move, back: Move) -> Tensor:
    """Return there(x); its backward pass applies `back` to the gradient."""
    if not torch.is_grad_enabled():
        return there(x)
    return _Through.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
