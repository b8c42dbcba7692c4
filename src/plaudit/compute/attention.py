"""Causal attention of whole sequences by our own kernels: no padding, no tensor of scores, shared prefixes computed
once.

One thread computes each (sequence, key head) in its processor cache, 24 queries at a time. The backward pass recomputes
weights from the logarithm of each row's sum (Dao et al. 2022, https://arxiv.org/abs/2205.14135). All threads share a
sequence so long that threads with shorter ones would wait for it. A query's result depends only on the keys up to it,
to the last bit, and not on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plaudit.compute.calls import run, side_by_side


class Sequences:
    """Sequences laid end to end, as the kernels read them.

    `index` (tokens of all sequences,) maps each token to its index among the computed tokens, if sequences share
    prefixes. A sequence may share only a prefix with earlier ones (`learn/prefixes.py`).
    """

    def __init__(self, lengths: Sequence[int], index: Tensor | None):
        sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        if min(lengths, default=0) < 1 or (index is not None and len(index) != sum(lengths)):
            read = "" if index is None else f" and an index of {len(index)} tokens"
            raise ValueError(f"lengths={list(lengths)}{read}: every length is at least 1, and their sum the index's.")
        place = torch.arange(sum(lengths), device="cpu") if index is None else index
        starts = F.pad(sizes.cumsum(0), (1, 0))
        shared = torch.zeros_like(sizes) if index is None else _known_before(place, starts)
        begins = F.pad(shared.cumsum(0), (1, 0))
        self.tokens = int(place.max()) + 1  # number of computed tokens
        self.shared = int(begins[-1])  # number of tokens shared with earlier sequences
        self.rows = (place, starts, begins)  # the kernels' arguments


def first_readers(place: Tensor) -> Tensor:
    """Return for each computed token the first token that it stands for; `place` (tokens,) maps tokens to computed."""
    first = torch.full((int(place.max()) + 1,), len(place), device="cpu")
    return first.scatter_reduce_(0, place, torch.arange(len(place), device="cpu"), "amin")


def _known_before(place: Tensor, starts: Tensor) -> Tensor:
    """Return the number of tokens that each sequence shares with earlier ones. Raises ValueError if shared tokens are
    not a prefix of both sequences."""
    first = first_readers(place)
    before = F.pad(place[:-1], (1, 0))
    before[starts[:-1]] = -1  # position of the token before; -1 at a start
    known = first[place]
    if int(first.max()) == len(place) or not torch.equal(before, before[known]):
        raise ValueError("index: each computed token must be read, and wherever it is, after the same tokens.")
    counts = F.pad((known < torch.arange(len(place), device="cpu")).cumsum(0), (1, 0))
    return counts[starts[1:]] - counts[starts[:-1]]


def attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, window: int | None) -> Tensor:
    """softmax(query key.T / sqrt(dim)) value of each sequence; a query sees the `window` keys up to its own.

    query (tokens, heads, dim), key and value (tokens, kv_heads, dim) -> (tokens, heads * dim). Differentiable once.
    Raises ValueError if these do not fit together, or do not fit the sequences.
    """
    if len(query) != sequences.tokens:
        raise ValueError(f"query is of {len(query)} tokens; the sequences have {sequences.tokens}.")
    return _Attention.apply(query, key, value, sequences, window)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, window: int | None
    ) -> Tensor:
        tokens, heads, dim = query.shape
        span = tokens if window is None else min(window, tokens)
        query, key, value = (side_by_side(x) for x in (query, key, value))
        out = query.new_empty(tokens, heads * dim)
        logs = query.new_empty(tokens, heads, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        run("attend", *sequences.rows, query, key, value, out, logs, window=span)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.sequences, ctx.window = sequences, span
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, logs = ctx.saved_tensors
        grad = grad.contiguous()
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        of_key, of_value = (x.new_empty(x.shape, dtype=torch.float32) for x in (key, value))
        rest = logs.new_empty(2 * ctx.sequences.shared, *key.shape[1:])
        known = (*ctx.sequences.rows, query, key, value, out, logs, grad)
        run("attend_back", *known, of_query, of_key, of_value, rest, window=ctx.window)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None
