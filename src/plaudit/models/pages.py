"""The KV cache as our own kernels read it on the CPU: a page of keys (dim, positions) after another, values row by row.

    scores = sum over dim of query[dim] * page[dim, :]       a register of positions at a time
    out = sum over positions of weight[p] * values[p, :]     a register of numbers at a time

Each sequence is read up to its own newest token, whatever lies beside it, in the order of additions that attention of
whole sequences has. In the precision of the model: scores and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from plaudit.kernels.library import available, number, run
from plaudit.maths.invariant import filled_up
from plaudit.models.cache import Cache, Past, Places, ProductCache
from plaudit.models.config import DecoderConfig


def make_cache(
    config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cache:
    """The cache that this device reads fastest, for a model that computes in `dtype`. Without kernels it is float32 on
    the CPU: small products are no faster in a lower precision there."""
    if torch.device(device).type != "cpu":
        return ProductCache(config, slots, length, dtype=dtype, device=device)
    if available(dtype):
        return PageCache(config, slots, length, dtype=dtype)
    return ProductCache(config, slots, length, dtype=torch.float32)


class PageCache(Cache):
    """Keys (slots, kv_heads, pages, dim, page), values (slots, kv_heads, length, width), where width is dim filled up
    to whole registers. A slot may lie anywhere in them: slots are moved by changing places."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        self.page = number("page_positions")
        super().__init__(config, slots, filled_up(length, self.page), dtype=dtype, device=device)
        pages, width = self.length // self.page, filled_up(self.dim, number("register_numbers"))
        self.keys = self._tables(config.layers, slots, self.kv_heads, pages, self.dim, self.page)
        self.values = self._tables(config.layers, slots, self.kv_heads, self.length, width)
        self.where = torch.arange(slots, device="cpu")  # the place of each slot
        self.form = torch.tensor((pages, width), device="cpu")  # the kernels' `Cache`

    def shape(self) -> Tensor:
        """The kernels' `Shape`."""
        heads, window = self.kv_heads * self.group, min(self.window or self.length, self.length)
        return torch.tensor((heads, self.kv_heads, self.dim, window, torch.get_num_threads()), device="cpu")

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        return self.where[slots], positions, self.shape()

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        slots, positions, shape = places
        new = (key, key.stride(0), value, value.stride(0))
        tables = self.keys[layer], self.values[layer]
        run("write", self.dtype, shape, self.form, len(positions), slots, positions, *new, *tables)

    def past(self, positions: Tensor, longest: int) -> Past:
        return _Pages(self, positions)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        places: list[int] = self.where.tolist()
        super().copy([places[slot] for slot in sources], [places[slot] for slot in targets], length)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        froms, tos = list(sources), list(targets)
        self.where[[*froms, *tos]] = self.where[[*tos, *froms]]

    def grown(self, config: DecoderConfig, length: int) -> Self:
        larger = super().grown(config, length)
        larger.where = self.where
        return larger

    def used(self, length: int) -> list[Tensor]:
        return [t[:, :, : -(-length // self.page)] for t in self.keys] + [t[:, :, :length] for t in self.values]


class _Pages:
    def __init__(self, cache: PageCache, positions: Tensor):
        self.cache, self.shape = cache, cache.shape()
        self.slots, self.positions = cache.where[: len(positions)], positions.contiguous()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, n = self.cache, len(self.positions)
        out = query.new_empty(n, query.shape[1] * query.shape[2])
        new = (query, query.stride(0), key, key.stride(0), value, value.stride(0))
        tables = cache.keys[layer], cache.values[layer]
        run("decode", cache.dtype, self.shape, cache.form, n, self.slots, self.positions, *new, *tables, out)
        return out
