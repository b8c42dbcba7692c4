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
from torch.nn import functional as F

from plaudit.kernels.library import run


class Sequences:
    """Sequences laid end to end, as the kernels read them.

    `index` (tokens,), for sequences that begin alike, says where each of their tokens stands among those that are
    computed. What a sequence has in common with earlier ones must be its beginning (`models/prefixes.py`).
    """

    def __init__(self, lengths: Sequence[int], index: Tensor | None):
        sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        place = torch.arange(sum(lengths), device="cpu") if index is None else index
        shared = torch.zeros_like(sizes) if index is None else _known_before(place, sizes)
        starts, begins = (F.pad(x.cumsum(0), (1, 0)) for x in (sizes, shared))
        self.shared = int(begins[-1])  # tokens that an earlier sequence has too
        self._kept = (place, starts, begins)
        numbers = (*(x.data_ptr() for x in self._kept), len(sizes), int(sizes.max()))
        self.numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # the kernels' `Rows`


def first_readers(place: Tensor) -> Tensor:
    """For each computed token, the first of the tokens that it stands for; `place` (tokens,) says which one each is."""
    first = torch.full((int(place.max()) + 1,), len(place), device="cpu")
    return first.scatter_reduce_(0, place, torch.arange(len(place), device="cpu"), "amin")


def _known_before(place: Tensor, sizes: Tensor) -> Tensor:
    """How many tokens of each sequence an earlier one has."""
    known = first_readers(place)[place] < torch.arange(len(place), device="cpu")
    seen, ends = F.pad(known.cumsum(0), (1, 0)), sizes.cumsum(0)
    return seen[ends] - seen[ends - sizes]


def _strided(*tensors: Tensor) -> Iterator[Tensor | int]:
    """Each tensor (tokens, heads, dim), with its heads side by side, and the numbers from a token to the next."""
    for x in tensors:
        whole = x if x.stride(1) == x.shape[2] else x.contiguous()
        yield whole
        yield whole.stride(0)


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
        numbers = (heads, key.shape[1], dim, min(window or tokens, tokens), torch.get_num_threads())
        shape = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        out = query.new_empty(tokens, heads * dim)
        logs = query.new_empty(tokens, heads, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        run("attend", query.dtype, sequences.numbers, shape, *_strided(query, key, value), out, logs)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.sequences, ctx.shape = sequences, shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, logs = ctx.saved_tensors
        grad = grad.contiguous()
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        of_key, of_value = (x.new_empty(x.shape, dtype=torch.float32) for x in (key, value))
        rest = logs.new_empty(2 * ctx.sequences.shared, *key.shape[1:])
        asked = (ctx.sequences.numbers, ctx.shape, *_strided(query, key, value))
        run("attend_back", query.dtype, *asked, out, logs, grad, of_query, of_key, of_value, rest)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None
