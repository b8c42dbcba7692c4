"""How the tokens of one forward pass see each other.

The decoder computes on a flat run of tokens and never on padding; a context tells it each token's position and does the
attention. `Packed` is whole sequences side by side (training, scoring, and the prompts of generation); `cache.py` adds
the contexts that read and write a KV cache.

Attention itself pads inside buckets of similar length (causal attention needs no mask then: real tokens never look at
the padding behind them). Projections, MLP, norms and head see no pad, but for the 3 % at most by which
`learn/readout.py` brings a pass to one of few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from assent.maths.invariant import KEYS, company, few, filled_up, keys
from assent.maths.products import slow_halves
from assent.models.fused import attention_by_products
from assent.models.gather import Reading, gathered

BUCKET_WASTE = 1.1
"""A bucket grows while its padded area stays below this multiple of its tokens; past it a second call is cheaper."""

PRODUCTS_LENGTH = 256
"""Sequences up to this length attend by plain matrix products in low precision on the CPU."""


class Context(Protocol):
    """The caller promises one entry of `positions` for each token; the implementer returns attention in that order."""

    positions: Tensor  # (tokens,) int64, counted from each sequence's start
    window: int | None  # the model's sliding attention window, which `attend` applies

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (tokens, heads, dim), key and value (tokens, kv_heads, dim) -> (tokens, heads * dim)."""
        ...


class Packed:
    """Whole sequences laid end to end, each attending causally to itself alone."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        window: int | None = None,
        recurring: bool = False,
        index: Sequence[int] | None = None,
    ):
        """`lengths` in tokens, every one at least 1. `window` is the family's sliding attention window, if any.

        `recurring` fills buckets up, so that their shapes come again from batch to batch, as products do well that are
        compiled for each shape. `index`, for sequences that begin alike, says where each of their tokens stands among
        those that are computed (see `prefixes.py`); without it every token is computed for itself.
        """
        self.lengths = tuple(lengths)
        self.window = window
        self._masks: dict[int, Tensor] = {}
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths={list(lengths)} must name at least one sequence of at least one token each.")
        starts = torch.tensor((0, *self.lengths), dtype=torch.int64).cumsum(0)[:-1]
        sizes = torch.tensor(self.lengths, dtype=torch.int64)
        total = sum(self.lengths)
        place = torch.arange(total) if index is None else torch.tensor(index)  # of each sequence's tokens
        first = place if index is None else _first(place)  # where each computed token is read first
        self.ends = place[starts + sizes - 1].to(device)  # index of each sequence's last token
        self.positions = (torch.arange(total) - starts.repeat_interleave(sizes))[first].to(device)
        buckets = _buckets(starts, sizes, torch.device(device), recurring=recurring)
        self.shapes = [(rows.shape[0], rows.shape[1]) for rows in buckets]  # (rows, longest) of each bucket
        even = len(set(self.lengths)) == 1 and self.shapes == [(len(self.lengths), self.lengths[0])]
        self.pad: Reading | None = None  # computed tokens -> padded rows
        self.unpad: Reading | None = None  # and back
        if index is not None or not even:  # else the flat tokens are the padded rows already
            read = torch.cat([rows.flatten() for rows in buckets])
            real = torch.cat([_real(rows).flatten() for rows in buckets])
            self.pad = Reading(place[read.clamp(min=0)], len(first), real=real, device=device)
            padded = torch.empty(total, dtype=torch.int64)
            padded[read[real]] = real.nonzero()[:, 0]
            self.unpad = Reading(padded[first], len(read), device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.pad is not None:
            query, key, value = (gathered(x, self.pad) for x in (query, key, value))
        areas = [rows * length for rows, length in self.shapes]
        parts = zip(self.shapes, *(torch.split(x, areas) for x in (query, key, value)), strict=True)
        outputs = [self._bucket(*part) for part in parts]
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return padded if self.unpad is None else gathered(padded, self.unpad)

    def _bucket(self, shape: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, length = shape
        heads, dim = query.shape[1], query.shape[2]
        q, k, v = (x.view(rows, length, x.shape[1], dim).transpose(1, 2) for x in (query, key, value))
        if k.shape[1] != heads:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        window = self.window if self.window is not None and length > self.window else None
        if query.dtype.itemsize < 4 and query.device.type == "cpu":
            out = self._half_on_cpu(q, k, v, window or length)
        elif window is not None:
            mask = sliding_mask(length, window, device=query.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(rows * length, heads * dim)

    def _half_on_cpu(self, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Attention in low precision, where torch's own takes several times as long on the CPU as in float32: by plain
        products for short sequences, where the processor has some, in float32 for long ones."""
        length = query.shape[2]
        if length <= PRODUCTS_LENGTH and not slow_halves():
            if length not in self._masks:  # the same in every layer
                seen = sliding_mask(length, window, device=query.device)
                self._masks[length] = torch.zeros(length, length).masked_fill_(~seen, float("-inf"))
            return attention_by_products(query, key, value, self._masks[length])
        wide = query.float(), key.float(), value.float()
        if window >= length:
            return F.scaled_dot_product_attention(*wide, is_causal=True).to(query.dtype)
        seen = sliding_mask(length, window, device=query.device)
        return F.scaled_dot_product_attention(*wide, attn_mask=seen).to(query.dtype)


def sliding_mask(length: int, window: int, *, device: torch.device | str) -> Tensor:
    """True where a query may look: at itself and the `window - 1` tokens before it. Shape (length, length)."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (age >= 0) & (age < window)


def _buckets(starts: Tensor, sizes: Tensor, device: torch.device, *, recurring: bool) -> list[Tensor]:
    """Rows of similar length together, longest first; each bucket is an index (rows, longest) into the flat tokens,
    which are computed on `device`.

    Pads repeat a row's last token. The rows that fill up a recurring bucket are no token's: they hold -1."""
    order = sizes.argsort(descending=True, stable=True).tolist()
    padded = [filled_up(size, KEYS) if recurring else size for size in sizes.tolist()]
    groups: list[list[int]] = [[]]
    tokens = 0
    for row in order:
        group = groups[-1]
        wasteful = group and (len(group) + 1) * padded[group[0]] > BUCKET_WASTE * (tokens + padded[row])
        if wasteful or (group and company(padded[row], device) != company(padded[group[0]], device)):
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += padded[row]
    indices = []
    for group in groups:
        rows = torch.tensor(group)
        offsets = torch.arange(keys(padded[group[0]], device))
        last = (sizes[rows] - 1)[:, None]
        index = starts[rows][:, None] + torch.minimum(offsets[None, :], last)
        missing = few(len(group), digits=2) - len(group) if recurring and len(offsets) <= PRODUCTS_LENGTH else 0
        indices.append(F.pad(index, (0, 0, 0, missing), value=-1))
    return indices


def _real(rows: Tensor) -> Tensor:
    """Which places of a bucket (rows, longest) are tokens: a repeated index is a pad."""
    real = rows >= 0
    real[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return real


def _first(place: Tensor) -> Tensor:
    """For each computed token, the first of those that it stands for."""
    first = torch.full((int(place.max()) + 1,), len(place))
    return first.scatter_reduce_(0, place, torch.arange(len(place)), "amin")
