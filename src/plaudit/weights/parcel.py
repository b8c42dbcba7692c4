"""Named tensors in a few flat buckets of bytes. Weights travel between processes in this form, never one call a
parameter.

    {name: tensor} -> pack -> Parcel (version, digest, entries, buckets) -> unpack -> {name: tensor}, views of buckets

The digest covers names, shapes and bits as sent; a receiver compares it before use. Pickled buckets are numpy arrays,
which shared memory and object stores pass on without a copy. `index` and `of_index` serve transports that move only the
buckets.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaudit.compute.digest import digest

BUCKET_BYTES = 1 << 24
"""So large that calls cost little, and so small that an allocator reuses the same memory at each update."""
ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that any dtype can view it."""
Array = np.ndarray[Any, np.dtype[np.uint8]]


class WeightsError(RuntimeError):
    """Weights are older than the engine's, belong to another model, or differ from those that were sent."""


@dataclass(frozen=True)
class Entry:
    """A tensor's place in the buckets."""

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
    buckets: tuple[Tensor, ...]
    beneath: str = ""
    """For adapters only: the digest of their base model."""

    def index(self) -> str:
        """Everything except the buckets' content."""
        header = {key: value for key, value in vars(self).items() if key not in ("entries", "buckets")}
        sizes = [len(bucket) for bucket in self.buckets]
        return json.dumps([header, [list(asdict(entry).values()) for entry in self.entries], sizes])

    @classmethod
    def of_index(cls, index: str, *, device: torch.device | str = "cpu") -> Parcel:
        """Make a parcel with empty buckets, to be filled."""
        header, entries, sizes = json.loads(index)
        buckets = tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        found = tuple(Entry(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in entries)
        return cls(entries=found, buckets=buckets, **header)

    @property
    def bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def __reduce__(self) -> tuple[Callable[..., Parcel], tuple[Any, ...]]:
        arrays = [bucket.cpu().numpy() for bucket in self.buckets]
        return _of_arrays, (self.version, self.digest, self.entries, arrays, self.beneath)


def _of_arrays(version: int, sent: str, entries: tuple[Entry, ...], arrays: Sequence[Array], beneath: str) -> Parcel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # shared memory is handed over read-only
        buckets = tuple(torch.from_numpy(array) for array in arrays)
    return Parcel(version, sent, entries, buckets, beneath)


@torch.no_grad()
def pack(
    weights: Mapping[str, Tensor],
    version: int,
    *,
    beneath: str = "",
    bucket_bytes: int = BUCKET_BYTES,
    device: torch.device | str = "cpu",
) -> Parcel:
    """Copy the weights into a parcel; a bucket has at most `bucket_bytes`, unless a single tensor is larger."""
    entries: list[Entry] = []
    sizes = [0]
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + size > bucket_bytes:
            sizes.append(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1], size))
        sizes[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    buckets = tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    for entry in entries:
        _view(buckets, entry).copy_(weights[entry.name].detach())
    return Parcel(version, digest(weights), tuple(entries), buckets, beneath)


def unpack(parcel: Parcel) -> dict[str, Tensor]:
    """Return the tensors, read-only views of the parcel."""
    return {entry.name: _view(parcel.buckets, entry) for entry in parcel.entries}


def _view(buckets: Sequence[Tensor], entry: Entry) -> Tensor:
    bucket = buckets[entry.bucket]
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype, device=bucket.device)
    return bucket[entry.start : entry.start + entry.size].view(dtype).view(entry.shape)
