"""Attention of whole sequences by torch, in buckets of similar length that are padded to their longest.

Causal attention then needs no mask: real tokens never see the padding after them. Used on every device except the CPU,
and on CPUs without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from plaudit.compute.attention import first_readers
from plaudit.compute.gather import Reading, gathered

BUCKET_WASTE = 1.1
"""A bucket grows while its padded area stays below this multiple of its tokens; past it a second call is cheaper."""


class Padded:
    """Attention of sequences of these lengths, laid end to end; `index` is as in `Packed`."""

    def __init__(self, lengths: Sequence[int], index: Tensor | None, *, window: int | None, device: torch.device):
        self.window = window
        self._masks: dict[int, Tensor] = {}  # masks of the sliding window by length, for all layers
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        total = sum(lengths)
        buckets = _buckets(starts, sizes)
        self.shapes = [(rows.shape[0], rows.shape[1]) for rows in buckets]  # (rows, longest) of each bucket
        even = len(set(lengths)) == 1 and self.shapes == [(len(lengths), lengths[0])]
        self.even = even and len(lengths) > 1 and index is None
        self.pad: Reading | None = None  # computed tokens -> padded rows
        self.unpad: Reading | None = None  # padded rows -> computed tokens
        if index is not None or not even:  # else the flat tokens are already one padded table
            place = torch.arange(total) if index is None else index
            first = place if index is None else first_readers(place)
            read = torch.cat([rows.flatten() for rows in buckets])
            real = torch.cat([_real(rows).flatten() for rows in buckets])
            self.pad = Reading(place[read], len(first), real=real, device=device)
            padded = torch.empty(total, dtype=torch.int64)
            padded[read[real]] = real.nonzero()[:, 0]
            self.unpad = Reading(padded[first], len(read), device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
        mask = self._mask(length, query.device)
        grouped = k.shape[1] != heads
        if grouped and not (q.is_cuda and mask is None and q.dtype.itemsize == 2):  # flash attention only
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        with self._kernels(q):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(rows * length, heads * dim)

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask of the sliding window, (length, length); None if plain causal attention is enough."""
        if self.window is None or length <= self.window:
            return None
        if length not in self._masks:
            self._masks[length] = sliding_mask(length, self.window, device=device)
        return self._masks[length]

    def _kernels(self, query: Tensor) -> AbstractContextManager[None]:
        """Return a context that excludes cuDNN on a GPU, unless all rows are of equal length: cuDNN takes a second for
        each new shape of a bucket, and only shapes of equal rows come again."""
        if query.is_cuda and not self.even:
            return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        return nullcontext()


def sliding_mask(length: int, window: int, *, device: torch.device | str) -> Tensor:
    """Return a mask (length, length), True where a query sees a key: its own and the `window - 1` ones before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _buckets(starts: Tensor, sizes: Tensor) -> list[Tensor]:
    """Group rows of similar length into buckets, longest first. Return each as an index (rows, longest) into the flat
    tokens; padding repeats the index of a row's last token."""
    order = sizes.argsort(descending=True, stable=True).tolist()
    padded = sizes.tolist()
    groups: list[list[int]] = [[]]
    tokens = 0
    for row in order:
        group = groups[-1]
        if group and (len(group) + 1) * padded[group[0]] > BUCKET_WASTE * (tokens + padded[row]):
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += padded[row]
    indices = []
    for group in groups:
        rows = torch.tensor(group)
        offsets = torch.arange(padded[group[0]])
        last = (sizes[rows] - 1)[:, None]
        indices.append(starts[rows][:, None] + torch.minimum(offsets[None, :], last))
    return indices


def _real(rows: Tensor) -> Tensor:
    """Return a mask (rows, longest), True where a bucket has a token: a repeated index is padding."""
    real = torch.ones_like(rows, dtype=torch.bool)
    real[:, 1:] = rows[:, 1:] != rows[:, :-1]
    return real
