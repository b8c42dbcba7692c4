"""The key-value cache of generation, and the contexts that use it: `Prefill` for prompts, `Decode` for next tokens.

    prompts -> Prefill (writes each into its slot) -> copy (a group's other slots) -> Decode, once per new token

`Joined` is both in one pass, so that prompts which come while others are decoded cost no pass of their own.

A slot is one sequence's row. Active sequences fill the first n slots, so that decoding reads plain views and never
gathers; whoever owns the cache keeps it so with `copy`. Left out: paging (a slot reserves `length` tokens), eviction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from assent.maths.invariant import KEYS, filled_up, keys
from assent.models.config import DecoderConfig
from assent.models.context import Packed

SMALL_PRODUCT = 400
"""Multiplications in a matrix of a batch below which torch takes another kernel, with another order of additions."""


def cache_dtype(model: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model's keys and values are kept in: on the CPU, small products are no faster in a lower precision than in
    float32, and training attends in float32 there."""
    return torch.float32 if device.type == "cpu" else model


class Cache:
    """Keys and values of `slots` sequences of up to `length` tokens, one tensor each a layer."""

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        self.least = filled_up(-(-SMALL_PRODUCT // (config.heads // config.kv_heads * config.head_dim)), KEYS)
        length = max(filled_up(length, KEYS), self.least)
        self.slots, self.length = slots, length
        self.window = config.window
        # So that decoding multiplies queries with keys, and weights with values, row by row, the form that is fastest.
        key_shape = (slots, config.kv_heads, config.head_dim, length)
        value_shape = (slots, config.kv_heads, length, config.head_dim)
        # Slices of one big tensor for all layers are far slower once compiled.
        # Zeros, not empty: a masked position weighs 0, and 0 times whatever memory held could be NaN.
        self.keys = [torch.zeros(key_shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(value_shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.dtype, self.device = dtype, torch.device(device)

    def write(self, layer: int, slots: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value (tokens, kv_heads, dim) at these slots and positions (tokens,)."""
        self.keys[layer][slots, :, :, positions] = key.to(self.dtype)
        self.values[layer][slots, :, positions] = value.to(self.dtype)

    def used(self, slots: int, length: int) -> list[Tensor]:
        """Views of the first `length` positions of the first slots: the layers' keys, then their values."""
        return [t[:slots, :, :, :length] for t in self.keys] + [t[:slots, :, :length] for t in self.values]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slot sources[i] to slot targets[i]; no slot may be in both lists."""
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for part in self.used(self.slots, length):
            part.index_copy_(0, target, part.index_select(0, source))

    def grown(self, config: DecoderConfig, length: int) -> Cache:
        """A cache of more positions with the same contents."""
        larger = Cache(config, self.slots, length, dtype=self.dtype, device=self.device)
        for old, new in zip((*self.keys, *self.values), larger.used(self.slots, self.length), strict=True):
            new.copy_(old)
        return larger


class Prefill(Packed):
    """Whole prompts end to end, the i-th also written into slot slots[i] from position 0."""

    def __init__(self, cache: Cache, slots: Sequence[int], lengths: Sequence[int]):
        super().__init__(lengths, device=cache.device, window=cache.window)
        self.cache = cache
        sizes = torch.tensor(self.lengths)
        self.slots = torch.tensor(slots).repeat_interleave(sizes).to(cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, self.positions, key, value)
        return super().attend(layer, query, key, value)


class Decode:
    """One new token for each of the first n slots: it is written, then looks at its slot up to itself."""

    def __init__(self, cache: Cache, positions: Tensor, longest: int):
        """positions (n,) int64 of the new tokens; `longest` is the largest of them + 1, which the caller knows without
        asking the device."""
        n = positions.shape[0]
        longest = max(keys(longest), cache.least)
        self.cache, self.positions, self.longest = cache, positions, longest
        self.window = cache.window
        self.slots = torch.arange(n, device=cache.device)
        age = positions[:, None] - torch.arange(longest, device=cache.device)  # (n, longest)
        hidden = age < 0
        if cache.window is not None:
            hidden |= age >= cache.window
        # Additive and in the cache's precision: made once a step instead of being converted in every layer.
        mask = torch.zeros(age.shape, dtype=cache.dtype, device=cache.device)
        mask = mask.masked_fill_(hidden, float("-inf"))
        self.mask = mask.repeat_interleave(cache.keys[0].shape[1], dim=0)[:, None]  # (n * kv_heads, 1, longest)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, self.positions, key, value)
        n, heads, dim = query.shape
        kv_heads = key.shape[1]
        # The query heads that share a KV head become that head's query length, so that no key is repeated.
        grouped = query.reshape(n * kv_heads, heads // kv_heads, dim).to(self.cache.dtype)
        past = self.cache.keys[layer][:n].flatten(0, 1)[:, :, : self.longest]  # (n * kv_heads, dim, longest)
        values = self.cache.values[layer][:n].flatten(0, 1)[:, : self.longest]  # (n * kv_heads, longest, dim)
        # Batched products, since torch's own attention spends far more on each row and head than one query is worth.
        weights = torch.baddbmm(self.mask, grouped, past, alpha=dim**-0.5).softmax(dim=-1)
        return torch.bmm(weights, values).to(query.dtype).view(n, heads * dim)


class Joined:
    """Next tokens and then prompts as one run of tokens, so that they share one pass over the weights."""

    def __init__(self, decode: Decode, prefill: Prefill):
        self.decode, self.prefill = decode, prefill
        self.window = decode.window
        self.positions = torch.cat((decode.positions, prefill.positions))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n = len(self.decode.positions)
        decoded = self.decode.attend(layer, query[:n], key[:n], value[:n])
        return torch.cat((decoded, self.prefill.attend(layer, query[n:], key[n:], value[n:])))
