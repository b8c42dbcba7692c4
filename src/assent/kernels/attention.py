"""Causal attention of whole sequences by kernels of our own: no padding, no tensor of scores, prefixes asked once.

Each (sequence, head) is computed by one thread out of its cache, 24 queries at a time (Dao et al. 2022,
https://arxiv.org/abs/2205.14135, for the backward pass: weights are computed again from each row's logarithm of a sum).
What a query gets depends on the keys up to it alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from assent.kernels.library import run


class Sequences:
    """Sequences laid end to end, as the kernels read them.

    `index` (tokens,), for sequences that begin alike, says where each of their tokens stands among those that are
    computed; those that share tokens must lie in one run of them, apart from all others (`models/prefixes.py`).
    """

    def __init__(self, lengths: Sequence[int], index: Tensor | None):
        sizes = torch.tensor(lengths, dtype=torch.int64)
        ends = sizes.cumsum(0)
        begins = ends - sizes
        if index is None:
            order, place = torch.arange(len(sizes)), torch.arange(int(ends[-1]))
            shared, heads = torch.zeros_like(sizes), begins
        else:
            heads = index[begins]  # sequences of a group begin with the same token
            order = heads.argsort(stable=True)
            place = torch.cat([index[begin:end] for begin, end in zip(begins[order], ends[order], strict=True)])
            sizes, heads = sizes[order], heads[order]
            begins = sizes.cumsum(0) - sizes
            shared = _asked_before(place, begins, sizes)
        groups, counts = torch.unique_consecutive(heads, return_counts=True)
        edge = counts.cumsum(0)
        total = int(place.max()) + 1
        ranges = torch.cat((groups, torch.tensor([total])))
        zero = torch.zeros(1, dtype=torch.int64)
        self._kept = (place, torch.cat((zero, sizes.cumsum(0))), shared, torch.cat((zero, edge)), ranges)
        widest = int((ranges[1:] - ranges[:-1]).max())
        numbers = [x.data_ptr() for x in self._kept] + [len(groups), int(sizes.max()), widest]
        self.numbers = torch.tensor(numbers, dtype=torch.int64)  # the kernels' `Rows`


def first_readers(place: Tensor) -> Tensor:
    """For each computed token, the first of the tokens that it stands for; `place` (tokens,) says which one each is."""
    first = torch.full((int(place.max()) + 1,), len(place))
    return first.scatter_reduce_(0, place, torch.arange(len(place)), "amin")


def _asked_before(place: Tensor, begins: Tensor, sizes: Tensor) -> Tensor:
    """How many tokens of each sequence an earlier one has."""
    known = first_readers(place)[place] < torch.arange(len(place))
    seen = torch.cat((torch.zeros(1, dtype=torch.int64), known.cumsum(0)))
    return seen[begins + sizes] - seen[begins]


def _strided(*tensors: Tensor) -> Iterator[Tensor | int]:
    """Each tensor (tokens, heads, dim), whose heads lie side by side, and the numbers from a token to the next."""
    for x in tensors:
        yield x
        yield x.stride(0)


def attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, window: int | None) -> Tensor:
    """softmax(query key.T / sqrt(dim)) value of each sequence; a query sees the `window` keys up to its own.

    query (tokens, heads, dim), key and value (tokens, kv_heads, dim) -> (tokens, heads * dim). Differentiable once.
    """
    return _Attention.apply(query, key, value, sequences, window)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, window: int | None
    ) -> Tensor:
        tokens, heads, dim = query.shape
        numbers = (heads, key.shape[1], dim, window or tokens, torch.get_num_threads())
        shape = torch.tensor(numbers, dtype=torch.int64)
        out = query.new_empty(tokens, heads * dim)
        logs = torch.empty(tokens, heads) if any(ctx.needs_input_grad) else None
        run("attend", query.dtype, sequences.numbers, shape, *_strided(query, key, value), out, logs)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.sequences, ctx.shape = sequences, shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, logs = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = [torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value)]
        asked = (ctx.sequences.numbers, ctx.shape, *_strided(query, key, value))
        run("attend_back", query.dtype, *asked, out, logs, grad, *gradients)
        return gradients[0], gradients[1], gradients[2], None, None
