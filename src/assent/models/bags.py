"""The KV cache as x86 CPUs read it fastest: attention of one new token a row as sums of weighted table rows.

    scores = sum over dim of query[dim] * keys[dim, :]        one bag of `dim` rows of PAGE positions each
    out = sum over positions of weight[p] * values[p, :]      one bag of `longest` rows of `dim` numbers each

That is what an embedding bag computes, and torch carries FBGEMM's kernel for it, which reads memory two to three times
as fast as batched products with a single row. A bag's sum goes through its rows in order, so it depends on nothing
beside it. Left out: precisions other than float32, other devices (`ProductCache` serves those).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from assent.maths.invariant import filled_up
from assent.models.cache import Cache, Past, Places, ProductCache
from assent.models.config import DecoderConfig

PAGE = 32
"""Positions whose keys lie together: (dim, PAGE) numbers that are read from end to end."""


def make_cache(
    config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cache:
    """The cache that this device reads fastest, for a model that computes in `dtype`. On the CPU it is float32: small
    products are no faster in a lower precision there, and training attends in float32."""
    if torch.device(device).type != "cpu":
        return ProductCache(config, slots, length, dtype=dtype, device=device)
    bags = "fbgemm" in torch.backends.quantized.supported_engines
    kind: type[Cache] = BagCache if bags else ProductCache
    return kind(config, slots, length, dtype=torch.float32)


class BagCache(Cache):
    """Keys (slots, kv_heads, pages, dim, PAGE), values (slots, kv_heads, length, dim). A bag names its rows, so a slot
    may lie anywhere in them: slots are moved by changing places."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        super().__init__(config, slots, filled_up(length, PAGE), dtype=dtype, device=device)
        self.pages = self.length // PAGE
        self.keys = self._tables(config.layers, slots, self.kv_heads, self.pages, self.dim, PAGE)
        self.values = self._tables(config.layers, slots, self.kv_heads, self.length, self.dim)
        self.where = torch.arange(slots)  # the place of each slot
        self._rows: _Rows | None = None

    def heads_of(self, slots: Tensor) -> Tensor:
        """The number of each slot's KV heads among all, (slots, kv_heads)."""
        return self.where[slots][:, None] * self.kv_heads + torch.arange(self.kv_heads)

    def rows(self, slots: int, pages: int) -> _Rows:
        """The same as long as neither changes: most steps have the rows of the step before."""
        if self._rows is None or (self._rows.slots, self._rows.pages) != (slots, pages):
            self._rows = _Rows(self, slots, pages)
        return self._rows

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        rows = self.heads_of(slots) * self.length + positions[:, None]
        return self.where[slots], positions // PAGE, positions % PAGE, rows.flatten()

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        slots, pages, places_in_page, rows = places
        self.keys[layer][slots, :, pages, :, places_in_page] = key.to(self.dtype)
        self.values[layer].view(-1, self.dim).index_copy_(0, rows, value.to(self.dtype).reshape(-1, self.dim))

    def past(self, positions: Tensor, longest: int) -> Past:
        return _Bags(self, positions, -(-longest // PAGE))

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        places: list[int] = self.where.tolist()
        super().copy([places[slot] for slot in sources], [places[slot] for slot in targets], length)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        froms, tos = list(sources), list(targets)
        self.where[[*froms, *tos]] = self.where[[*tos, *froms]]
        self._rows = None

    def grown(self, config: DecoderConfig, length: int) -> Self:
        larger = super().grown(config, length)
        larger.where = self.where
        return larger

    def used(self, length: int) -> list[Tensor]:
        return [t[:, :, : -(-length // PAGE)] for t in self.keys] + [t[:, :, :length] for t in self.values]


class _Rows:
    """Row numbers of the bags of the first `slots` slots that see `pages` pages, one bag a query head."""

    def __init__(self, cache: BagCache, slots: int, pages: int):
        self.slots, self.pages, self.longest = slots, pages, pages * PAGE
        owner = cache.heads_of(torch.arange(slots)).repeat_interleave(cache.group, dim=1).view(-1, 1)  # (heads, 1)
        page = (owner * cache.pages + torch.arange(pages)).view(-1, 1)  # (heads * pages, 1)
        self.keys = (page * cache.dim + torch.arange(cache.dim)).flatten()
        self.key_starts = torch.arange(len(page)) * cache.dim
        self.values = (owner * cache.length + torch.arange(self.longest)).flatten()
        self.value_starts = torch.arange(len(owner)) * self.longest


class _Bags:
    def __init__(self, cache: BagCache, positions: Tensor, pages: int):
        self.cache, self.rows = cache, cache.rows(len(positions), pages)
        self.mask = cache.mask(positions, self.rows.longest)[:, None]  # (n, 1, longest)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        (n, heads, dim), cache, rows = query.shape, self.cache, self.rows
        asked = (query * dim**-0.5)[:, :, None].expand(n, heads, rows.pages, dim).reshape(-1)
        scores = _summed(cache.keys[layer].view(-1, PAGE), rows.keys, rows.key_starts, asked)
        weights = scores.view(n, heads, rows.longest).add_(self.mask).softmax(dim=-1)
        out = _summed(cache.values[layer].view(-1, dim), rows.values, rows.value_starts, weights.view(-1))
        return out.view(query.shape)


def _summed(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """For each bag, from its start to the next, the sum of weights[i] * table[rows[i]]: (bags, width)."""
    # Not F.embedding_bag, which spends as long on checking its arguments as on a small sum.
    bag = torch.ops.aten._embedding_bag_forward_only
    out: Tensor = bag(table, rows, starts, False, 0, False, weights, False, -1)[0]
    return out
