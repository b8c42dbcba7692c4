"""Pack boxes of named tensors into a few flat buckets of bytes. Weights are sent between processes in this form, never
with one call per parameter.

    boxes that a process holds -> pack -> PackedWeights (version, digest, entries, buckets) -> with those of all others
    -> unpack -> {name: tensor}: views of buckets, or put together when they are asked for

The digest covers names, shapes and bits of the whole tensors, so it does not depend on who sends which box. A receiver
compares it before use. Pickled buckets are numpy arrays, which shared memory and object stores pass on without a copy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plaudit.weights.pieces import BUCKET_BYTES, Piece, WeightsError, digest_of_pieces

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that any dtype can view it."""
Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Entry:
    """Where a box is: at byte `start` of a bucket (`size` bytes); in a tensor of `shape`, from `at`, with `sizes`."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    bucket: int
    start: int
    size: int
    shape: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class PackedWeights:
    """A rank's boxes of one version's weights, or of a part of them, in flat buckets (uint8)."""

    version: int
    digest: str
    entries: tuple[Entry, ...]
    buckets: tuple[Tensor, ...]
    beneath: str = ""
    """For adapters only: the digest of their base model."""
    base: str = ""
    """The `name` of the weights of which the buckets hold only changes (`changes.py`); "" if they hold everything."""

    @property
    def name(self) -> str:
        return f"version {self.version} with digest {self.digest}"

    @property
    def halves(self) -> bool:
        """True if every number is a bfloat16."""
        return all(entry.dtype == "bfloat16" for entry in self.entries)

    def on_host(self) -> PackedWeights:
        return replace(self, buckets=tuple(bucket.cpu() for bucket in self.buckets))

    @property
    def bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def __reduce__(self) -> tuple[Callable[..., PackedWeights], tuple[Any, ...]]:
        arrays = [bucket.cpu().numpy() for bucket in self.buckets]
        return _of_arrays, (self.version, self.digest, self.entries, arrays, self.beneath, self.base)


class PackReport(NamedTuple):
    """A rank's report to the driver about its packed share of the weights, or about one part of that share."""

    digest: str
    """Digest of the whole weights, over all ranks' shares."""
    parts: int
    """Number of parts of the rank's share; 0 if it sends none."""
    bytes: int
    """Bytes sent to a worker that holds the last version."""
    whole: int
    """Bytes sent to any other worker."""


def _of_arrays(
    version: int, sent: str, entries: tuple[Entry, ...], arrays: Sequence[Array], beneath: str, base: str
) -> PackedWeights:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # arrays in shared memory are read-only
        buckets = tuple(torch.from_numpy(array) for array in arrays)
    return PackedWeights(version, sent, entries, buckets, beneath, base)


@torch.no_grad()
def pack(
    weights: Mapping[str, Tensor] | Sequence[Piece],
    version: int,
    *,
    digest: str = "",
    beneath: str = "",
    bucket_bytes: int = BUCKET_BYTES,
    device: torch.device | str = "cpu",
) -> PackedWeights:
    """Copy whole tensors, or boxes of tensors, into buckets on `device`. A bucket has at most `bucket_bytes`, unless a
    single box is larger. `digest`: of all ranks' tensors; by default it is computed from these weights."""
    pieces = weights if isinstance(weights, Sequence) else pieces_of(weights)
    entries: list[Entry] = []
    sizes = [0]
    for name, shape, at, values, kind in pieces:
        size = values.numel() * kind.itemsize
        if sizes[-1] and sizes[-1] + size > bucket_bytes:
            sizes.append(0)
        dtype = str(kind).removeprefix("torch.")
        entries.append(Entry(name, dtype, tuple(values.shape), len(sizes) - 1, sizes[-1], size, shape, at))
        sizes[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    buckets = tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
    for entry, piece in zip(entries, pieces, strict=True):
        _view(buckets, entry).copy_(piece.values)
    return PackedWeights(version, digest or digest_of_pieces(pieces), tuple(entries), buckets, beneath)


class Unpacked(Mapping[str, Tensor]):
    """Packed tensors by name. A tensor that came in one box is a view of its bucket: do not change it. A tensor in
    several boxes is put together at each access, and not kept. Raises WeightsError if boxes are missing."""

    def __init__(self, packed_parts: Sequence[PackedWeights]):
        self._held: dict[str, list[Piece]] = {}
        for packed in packed_parts:
            for entry in packed.entries:
                values = _view(packed.buckets, entry)
                piece = Piece(entry.name, entry.shape, entry.at, values, values.dtype)
                self._held.setdefault(entry.name, []).append(piece)
        for name, held in self._held.items():
            there, shape = sum(piece.values.numel() for piece in held), held[0].shape
            if there != math.prod(shape) or len({(piece.shape, piece.dtype) for piece in held}) > 1:
                raise WeightsError(f"The packed weights have {there:,} numbers of {name}, whose shape is {shape}.")

    def __getitem__(self, name: str) -> Tensor:
        (first, *others) = held = self._held[name]
        if not others:
            return first.values
        found = torch.empty(first.shape, dtype=first.dtype, device=first.values.device)
        for _, _, at, values, _ in held:
            found[tuple(slice(start, start + size) for start, size in zip(at, values.shape, strict=True))] = values
        return found

    @property
    def pieces(self) -> list[Piece]:
        return [piece for held in self._held.values() for piece in held]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def unpack(*packed_parts: PackedWeights) -> Mapping[str, Tensor]:
    """Return the tensors of one version by name. Raises WeightsError if versions or digests differ, or boxes
    are missing."""
    if len(kinds := {(one.version, one.digest, one.beneath) for one in packed_parts}) != 1:
        raise WeightsError(f"These packed weights are not of one version: {sorted(kinds)}.")
    return Unpacked(packed_parts)


def pieces_of(weights: Mapping[str, Tensor]) -> list[Piece]:
    """Return the boxes of `Unpacked` tensors as they were sent; for another mapping, each whole tensor as a piece."""
    return weights.pieces if isinstance(weights, Unpacked) else [Piece.whole(*one) for one in weights.items()]


def _view(buckets: Sequence[Tensor], entry: Entry) -> Tensor:
    bucket = buckets[entry.bucket]
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.size:
        return torch.empty(entry.sizes, dtype=dtype, device=bucket.device)
    return bucket[entry.start : entry.start + entry.size].view(dtype).view(entry.sizes)
