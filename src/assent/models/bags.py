"""The KV cache as x86 CPUs read it fastest: attention of one new token a row as sums of weighted table rows.

    scores = sum over dim of query[dim] * keys[dim, :]        one bag of `dim` rows of PAGE positions each
    out = sum over positions of weight[p] * values[p, :]      one bag of `longest` rows of `dim` numbers each

That is what an embedding bag computes, and torch carries FBGEMM's kernel for it, which reads memory two to three times
as fast as batched products with a single row. A bag's sum goes through its rows in order, so it depends on nothing
beside it. Left out: precisions other than float32, other devices (`ProductCache` serves those).
"""

from __future__ import annotations

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
    """Keys (slots, kv_heads, pages, dim, PAGE), values (slots, kv_heads, length, dim)."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        super().__init__(config, slots, filled_up(length, PAGE), dtype=dtype, device=device)
        self.pages = self.length // PAGE
        self.keys = self._tables(config.layers, slots, self.kv_heads, self.pages, self.dim, PAGE)
        self.values = self._tables(config.layers, slots, self.kv_heads, self.length, self.dim)

    def heads_of(self, slots: Tensor) -> Tensor:
        """The number of each slot's KV heads among all, (slots, kv_heads)."""
        return slots[:, None] * self.kv_heads + torch.arange(self.kv_heads)

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        rows = self.heads_of(slots) * self.length + positions[:, None]
        return slots, positions // PAGE, positions % PAGE, rows.flatten()

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        slots, pages, places_in_page, rows = places
        self.keys[layer][slots, :, pages, :, places_in_page] = key.to(self.dtype)
        self.values[layer].view(-1, self.dim).index_copy_(0, rows, value.to(self.dtype).reshape(-1, self.dim))

    def past(self, positions: Tensor, longest: int) -> Past:
        return _Bags(self, positions, -(-longest // PAGE))

    def used(self, slots: int, length: int) -> list[Tensor]:
        pages = -(-length // PAGE)
        return [t[:slots, :, :pages] for t in self.keys] + [t[:slots, :, :length] for t in self.values]


class _Bags:
    """Row numbers of the bags of n tokens that see `pages` pages, one bag a query head."""

    def __init__(self, cache: BagCache, positions: Tensor, pages: int):
        n, longest = len(positions), pages * PAGE
        self.cache, self.pages, self.longest = cache, pages, longest
        self.mask = cache.mask(positions, longest)[:, None]  # (n, 1, longest)
        owner = cache.heads_of(torch.arange(n)).repeat_interleave(cache.group, dim=1).view(-1, 1)  # (n * heads, 1)
        page = (owner * cache.pages + torch.arange(pages)).view(-1, 1)  # (n * heads * pages, 1)
        self.key_rows = (page * cache.dim + torch.arange(cache.dim)).flatten()
        self.key_starts = torch.arange(len(page)) * cache.dim
        self.value_rows = (owner * cache.length + torch.arange(longest)).flatten()
        self.value_starts = torch.arange(len(owner)) * longest

    def attend(self, layer: int, query: Tensor) -> Tensor:
        (n, heads, dim), cache = query.shape, self.cache
        asked = (query * dim**-0.5)[:, :, None].expand(n, heads, self.pages, dim).reshape(-1)
        scores = _summed(cache.keys[layer].view(-1, PAGE), self.key_rows, self.key_starts, asked)
        weights = scores.view(n, heads, self.longest).add_(self.mask).softmax(dim=-1)
        out = _summed(cache.values[layer].view(-1, dim), self.value_rows, self.value_starts, weights.view(-1))
        return out.view(query.shape)


def _summed(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """For each bag, from its start to the next, the sum of weights[i] * table[rows[i]]: (bags, width)."""
    # Not F.embedding_bag, which spends as long on checking its arguments as on a small sum.
    bag = torch.ops.aten._embedding_bag_forward_only
    out: Tensor = bag(table, rows, starts, False, 0, False, weights, False, -1)[0]
    return out
