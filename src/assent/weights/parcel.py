"""All weights of a model in a few flat runs of bytes: what travels between processes, never one call a parameter.

    {name: tensor} -> pack -> Parcel (version, digest, index, buckets) -> unpack -> {name: tensor}, views of the buckets

The buckets are numpy arrays, which shared memory and object stores hand over without a copy. The digest is of names,
shapes and bits as they were sent: whoever receives a parcel compares before it uses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assent.models.digest import digest

BUCKET_BYTES = 1 << 28
ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that any dtype can view it."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    start: int
    size: int


@dataclass(frozen=True)
class Parcel:
    """Weights of one version."""

    version: int
    digest: str
    entries: tuple[Entry, ...]
    buckets: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]

    @property
    def bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)


@torch.no_grad()
def pack(weights: Mapping[str, Tensor], version: int, *, bucket_bytes: int = BUCKET_BYTES) -> Parcel:
    """A copy of the weights; a bucket has at most `bucket_bytes`, unless one tensor alone is larger."""
    entries: list[Entry] = []
    sizes = [0]
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + size > bucket_bytes:
            sizes.append(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1], size))
        sizes[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    buckets = tuple(np.zeros(size, dtype=np.uint8) for size in sizes)
    for entry in entries:
        _view(buckets, entry).copy_(weights[entry.name].detach())
    return Parcel(version, digest(weights), tuple(entries), buckets)


def unpack(parcel: Parcel) -> dict[str, Tensor]:
    """The tensors, to be read only: they are views of the parcel."""
    return {entry.name: _view(parcel.buckets, entry) for entry in parcel.entries}


def _view(buckets: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...], entry: Entry) -> Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    part = buckets[entry.bucket][entry.start : entry.start + entry.size]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # shared memory is handed over read-only
        flat = torch.from_numpy(part)
    return flat.view(dtype).view(entry.shape)
