"""A context decides which tokens of a forward pass see each other.

The decoder computes on flat tokens and never on padding; a context gives each token's position and does the attention.
`Packed` holds whole sequences (training, scoring, prompts of generation); `cache.py` adds contexts with a KV cache. On
the CPU attention is our own kernel (`compute/attention.py`), elsewhere torch's, padded (`padded.py`). Projections, MLP,
norms and head see no padding, except for the 3 % at most by which `learn/readout.py` fills a pass to one of few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from plaudit.compute.attention import Sequences, attention, first_readers
from plaudit.compute.axis import ALONE, Axis
from plaudit.compute.calls import usable
from plaudit.compute.padded import Padded


class Context(Protocol):
    """The caller promises one entry of `positions` per token; the implementer returns attention in the same order."""

    positions: Tensor  # (tokens,) int64, counted from each sequence's start
    window: int | None  # the model's sliding attention window, which `attend` applies

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (tokens, heads, dim), key and value (tokens, kv_heads, dim) -> (tokens, heads * dim)."""
        ...


class Packed:
    """Whole sequences laid end to end; each attends causally to itself only."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        window: int | None = None,
        index: Sequence[int] | None = None,
        axis: Axis = ALONE,
    ):
        """`lengths` in tokens, each at least 1. `window` is the family's sliding attention window, if any. `index`, for
        sequences that share prefixes, maps each token to its index among the computed ones (see `prefixes.py`); by
        default every token is computed. `positions` are those of this rank's run; the runs along `axis` are equal."""
        self.lengths = tuple(lengths)
        self.window, self.axis = window, axis
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths={list(lengths)} must name at least one sequence of at least one token each.")
        self._device = torch.device(device)
        sizes = torch.tensor(self.lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        total = sum(self.lengths)
        self._index = None if index is None else torch.tensor(index)
        place = torch.arange(total) if self._index is None else self._index  # each token's index among the computed
        first = place if self._index is None else first_readers(place)  # where each computed token is read first
        self.ends = place[starts + sizes - 1].to(device)  # index of each sequence's last token
        positions = (torch.arange(total) - starts.repeat_interleave(sizes))[first]
        self.positions = positions.chunk(axis.size)[axis.rank].to(device)

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences(self.lengths, self._index)

    @cached_property
    def padded(self) -> Padded:
        return Padded(self.lengths, self._index, window=self.window, device=self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self._attended(query, key, value)
        tokens, _, dim = query.shape
        parts = [x.reshape(tokens, self.axis.size, -1, dim) for x in (query, key, value)]
        mine = self.axis.to_heads(torch.cat(parts, dim=2))  # (all tokens, heads, dim)
        query, key, value = torch.split(mine, [part.shape[2] for part in parts], dim=1)
        return self.axis.to_tokens(self._attended(query, key, value)).flatten(1)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if usable(query, key, value):
            return attention(query, key, value, self.sequences, self.window)
        return self.padded.attend(query, key, value)
