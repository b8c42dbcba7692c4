"""The key-value cache of generation, and the contexts that use it: `Prefill` for prompts, `Decode` for next tokens.

    prompts -> Prefill (writes each into its slot) -> copy (a group's other slots) -> Decode, once per new token

`Joined` is both in one pass, so that prompts which come while others are decoded cost no pass of their own.

A slot is one sequence's row. Active sequences fill the first n slots, so that decoding reads plain views and never
gathers; the cache's owner ensures that with `move`. `decode/pages.py` has the layout of our own kernels. Left out:
paging (a slot reserves `length` tokens), eviction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from plaudit.compute.context import Packed
from plaudit.compute.invariant import filled_up
from plaudit.models.config import DecoderConfig

ALIGNED = 16
"""Keys are read in multiples of this many: fast low-precision matrix products on a GPU need aligned sizes."""

Places = tuple[Tensor, ...]
"""Indices at which tokens are written, in a form that depends on the cache's class; the same in every layer."""


class Past(Protocol):
    """The keys and values that one new token in each of the first n slots attends to, in every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value (n, kv_heads, dim), then attend with query (n, heads, dim), all in the cache's dtype.
        Return (n, heads * dim)."""
        ...


class Cache(ABC):
    """Keys and values of `slots` sequences of up to `length` tokens: one tensor of keys and one of values per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        self.slots, self.length = slots, length
        self.kv_heads, self.dim, self.group = config.kv_heads, config.head_dim, config.heads // config.kv_heads
        self.window = config.window
        self.dtype, self.device = dtype, torch.device(device)

    def _tables(self, layers: int, *shape: int) -> list[Tensor]:
        # One tensor a layer: slices of one big tensor for all layers are far slower once compiled.
        # Zeros, not empty: a masked position weighs 0, and 0 times whatever memory held could be NaN.
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layers)]

    @abstractmethod
    def places(self, slots: Tensor, positions: Tensor) -> Places:
        """Return the cache's indices for tokens at these slots and positions, both (tokens,), as `write` takes them."""

    @abstractmethod
    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        """Store key and value (tokens, kv_heads, dim) in the cache's precision."""

    @abstractmethod
    def past(self, positions: Tensor, longest: int) -> Past:
        """Return the past of new tokens at `positions` (n,) of the first n slots: each sees its slot up to itself.
        `longest` is the largest position + 1, which the caller knows without waiting for the device."""

    @abstractmethod
    def used(self, length: int) -> list[Tensor]:
        """Return views of at least the first `length` positions of all slots: every layer's keys, then the values."""

    def mask(self, positions: Tensor, longest: int) -> Tensor:
        """Return the attention mask (n, longest): 0 where a token may look, -inf elsewhere. It has the cache's dtype:
        made once a step, it need not be converted in every layer."""
        age = positions[:, None] - torch.arange(longest, device=self.device)
        hidden = age < 0
        if self.window is not None:
            hidden |= age >= self.window
        return torch.zeros(age.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slot sources[i] to slot targets[i]; no slot may be in both lists."""
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for part in self.used(length):
            part.index_copy_(0, target, part.index_select(0, source))

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Move the first `length` positions of slot sources[i] to slot targets[i]; the source is then free."""
        self.copy(sources, targets, length)

    def taken(self, slot: int, length: int) -> list[Tensor]:
        """Return copies of at least the first `length` positions of a slot, as `put` takes them."""
        return [part[slot].clone() for part in self.used(length)]

    def put(self, slot: int, parts: Sequence[Tensor], length: int) -> None:
        """Write what was `taken` with this length into a slot of this cache, or of another of its class."""
        for part, own in zip(self.used(length), parts, strict=True):
            part[slot] = own

    def grown(self, config: DecoderConfig, length: int) -> Self:
        """Return a larger cache, of at least `length` positions, with the same contents."""
        larger = type(self)(config, self.slots, length, dtype=self.dtype, device=self.device)
        own, theirs = (cache.used(self.length) for cache in (self, larger))
        for old, new in zip(own, theirs, strict=True):
            new.copy_(old)
        return larger


class ProductCache(Cache):
    """The cache for attention by torch's batched products: queries times keys, then weights times values. For a single
    query, torch's own attention costs far more per row and head."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        length = filled_up(length, ALIGNED)
        super().__init__(config, slots, length, dtype=dtype, device=device)
        self.keys = self._tables(config.layers, slots, self.kv_heads, self.dim, length)
        self.values = self._tables(config.layers, slots, self.kv_heads, length, self.dim)

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        return slots, positions

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        slots, positions = places
        self.keys[layer][slots, :, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def past(self, positions: Tensor, longest: int) -> Past:
        return _Products(self, positions, filled_up(longest, ALIGNED))

    def used(self, length: int) -> list[Tensor]:
        return [t[..., :length] for t in self.keys] + [t[:, :, :length] for t in self.values]


class _Products:
    def __init__(self, cache: ProductCache, positions: Tensor, longest: int):
        self.cache, self.longest = cache, longest
        self.places = cache.places(torch.arange(len(positions), device=cache.device), positions)
        # (n * kv_heads, 1, longest)
        self.mask = cache.mask(positions, longest).repeat_interleave(cache.kv_heads, dim=0)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, n = self.cache, len(query)
        cache.write(layer, self.places, key, value)
        # The query heads that share a KV head become that head's query length, so that no key is repeated.
        grouped = query.reshape(n * cache.kv_heads, cache.group, cache.dim)
        past = cache.keys[layer][:n].flatten(0, 1)[:, :, : self.longest]  # (n * kv_heads, dim, longest)
        values = cache.values[layer][:n].flatten(0, 1)[:, : self.longest]  # (n * kv_heads, longest, dim)
        weights = torch.baddbmm(self.mask, grouped, past, alpha=cache.dim**-0.5).softmax(dim=-1)
        return torch.bmm(weights, values).view(n, -1)


class Prefill(Packed):
    """The context of whole prompts, concatenated; the i-th is also written into slot slots[i] from position 0."""

    def __init__(self, cache: Cache, slots: Sequence[int], lengths: Sequence[int]):
        super().__init__(lengths, device=cache.device, window=cache.window)
        self.cache = cache
        sizes = torch.tensor(self.lengths)
        self.places = cache.places(torch.tensor(slots).repeat_interleave(sizes).to(cache.device), self.positions)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.write(layer, self.places, key, value)
        return super().attend(layer, query, key, value)


class Decode:
    """The context of one new token in each of the first n slots: each is written, then attends to its slot so far."""

    def __init__(self, cache: Cache, positions: Tensor, longest: int):
        """positions (n,) int64 of the new tokens; `longest` as in `Cache.past`."""
        self.cache, self.positions, self.window = cache, positions, cache.window
        self.past = cache.past(positions, longest)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.past.attend(layer, query, key, value)


class Joined:
    """The context of next tokens followed by prompts, concatenated, so that they share one pass over the weights."""

    def __init__(self, decode: Decode, prefill: Prefill):
        self.decode, self.prefill = decode, prefill
        self.window = decode.window
        self.positions = torch.cat((decode.positions, prefill.positions))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n = len(self.decode.positions)
        decoded = self.decode.attend(layer, query[:n], key[:n], value[:n])
        return torch.cat((decoded, self.prefill.attend(layer, query[n:], key[n:], value[n:])))
