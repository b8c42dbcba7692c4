"""The KV cache in the layout of our own CPU kernels: keys in pages of (dim, positions), values row by row.

    scores = sum over dim of query[dim] * page[dim, :]       a register of positions at a time
    out = sum over positions of weight[p] * values[p, :]     a register of numbers at a time

Each sequence is read up to its own newest token. Additions have the same order as in attention of whole sequences. The
cache has the model's dtype; scores and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from plaudit.compute.calls import available, run, side_by_side
from plaudit.compute.invariant import filled_up
from plaudit.compute.library import number
from plaudit.models.config import DecoderConfig
from plaudit.rollout.decode.cache import Cache, Past, Places, ProductCache


def make_cache(
    config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cache:
    """Return a `PageCache` if our CPU kernels compute in `dtype` on this device, else a `ProductCache`."""
    form = PageCache if torch.device(device).type == "cpu" and available(dtype) else ProductCache
    return form(config, slots, length, dtype=dtype, device=device)


class PageCache(Cache):
    """Keys (slots, kv_heads, pages, dim, page), values (slots, kv_heads, length, width), where width is dim filled up
    to whole registers. `where` has each slot's row in these tensors, so `move` exchanges rows without copying."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        self.page = number("page_positions")
        super().__init__(config, slots, filled_up(length, self.page), dtype=dtype, device=device)
        pages, width = self.length // self.page, filled_up(self.dim, number("register_numbers"))
        self.keys = self._tables(config.layers, slots, self.kv_heads, pages, self.dim, self.page)
        self.values = self._tables(config.layers, slots, self.kv_heads, self.length, width)
        self.where = torch.arange(slots, device="cpu")  # (slots,) each slot's row
        self.span = self.length if self.window is None else min(self.window, self.length)
        tables = [(keys.data_ptr(), values.data_ptr()) for keys, values in zip(self.keys, self.values, strict=True)]
        self.tables = torch.tensor(tables, device="cpu")  # the kernels' `Tables`

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        return self.where[slots], positions.contiguous()

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        run("write", *places, side_by_side(key), side_by_side(value), self.keys[layer], self.values[layer])

    def past(self, positions: Tensor, longest: int) -> Past:
        return _Pages(self, positions)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        places: list[int] = self.where.tolist()
        super().copy([places[slot] for slot in sources], [places[slot] for slot in targets], length)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        froms, tos = list(sources), list(targets)
        self.where[[*froms, *tos]] = self.where[[*tos, *froms]]

    def taken(self, slot: int, length: int) -> list[Tensor]:
        return super().taken(int(self.where[slot]), length)

    def put(self, slot: int, parts: Sequence[Tensor], length: int) -> None:
        super().put(int(self.where[slot]), parts, length)

    def grown(self, config: DecoderConfig, length: int) -> Self:
        larger = super().grown(config, length)
        larger.where = self.where
        return larger

    def used(self, length: int) -> list[Tensor]:
        return [t[:, :, : -(-length // self.page)] for t in self.keys] + [t[:, :, :length] for t in self.values]


class _Pages:
    def __init__(self, cache: PageCache, positions: Tensor):
        self.cache = cache
        self.slots, self.positions = cache.where[: len(positions)], positions.contiguous()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, out = self.cache, query.new_empty(len(query), query.shape[1] * query.shape[2])
        new = (side_by_side(x) for x in (query, key, value))
        tables = cache.keys[layer], cache.values[layer]
        run("decode", self.slots, self.positions, *new, *tables, out, window=cache.span)
        return out
