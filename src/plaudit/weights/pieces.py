"""Boxes of named tensors, and the digest of tensors whose boxes are spread over several processes.

a process's boxes -> Piece, ... -> digest_of_pieces -> a digest that does not depend on which process has which box
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plaudit.compute.digest import box_sum, digest_of

BUCKET_BYTES = 1 << 24
"""Bytes of a bucket: large enough that calls cost little, small enough that its memory is reused at each update."""


PART_BYTES = 1 << 26
"""Most bytes that a rank packs at once (a part), besides its weights; a part has several buckets."""


class WeightsError(RuntimeError):
    """Weights are older than the engine's, belong to another model, or differ from those that were sent."""


class Piece(NamedTuple):
    """A box of a tensor with its values; it may be the whole tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    at: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    values: Tensor
    dtype: torch.dtype
    """The precision in which it is sent."""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach(), tensor.dtype)

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize

    def cut(self, most: int) -> Iterator[Piece]:
        """Yield this piece in runs of rows (dimension 0) of at most `most` bytes each, but at least one row."""
        if self.bytes <= most or not self.at:
            yield self
            return
        rows = max(1, most * len(self.values) // self.bytes)
        for number, some in enumerate(torch.split(self.values, rows)):
            yield self._replace(at=(self.at[0] + number * rows, *self.at[1:]), values=some)

    def sum(self) -> Tensor:
        """Return this box's term of its tensor's digest sum (`box_sum`), an int64 scalar; copy a bucket at a time."""
        total = torch.zeros((), dtype=torch.int64, device=self.values.device)
        for some in self.cut(BUCKET_BYTES):
            total += box_sum(some.values.to(self.dtype), self.shape, some.at)
        return total


@torch.no_grad()
def digest_of_pieces(
    pieces: Iterable[Piece],
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]] | None = None,
    total: Callable[[Tensor], None] = lambda sums: None,
) -> str:
    """Return the digest of tensors whose pieces are spread over processes; `tensors`: dtype and whole shape by name, by
    default those of `pieces`. `total` replaces int64 numbers in place by their sums over processes, modulo 2^64."""
    pieces = list(pieces)
    tensors = {one.name: (one.dtype, one.shape) for one in pieces} if tensors is None else tensors
    found: dict[str, Tensor | int] = dict.fromkeys(tensors, 0)
    for piece in pieces:
        found[piece.name] = found[piece.name] + piece.sum()
    sums = torch.tensor([int(one) for one in found.values()], dtype=torch.int64, device="cpu")
    total(sums)
    return digest_of({name: (*tensors[name], one) for name, one in zip(tensors, sums.tolist(), strict=True)})


def grouped(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces into parts of at most PART_BYTES each; a larger piece is cut into rows. Return [] for no pieces."""
    parts: list[list[Piece]] = [[]] if pieces else []
    size = 0
    for piece in (some for one in pieces for some in one.cut(PART_BYTES)):
        if parts[-1] and size + piece.bytes > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.bytes
    return parts
