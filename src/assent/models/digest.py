"""One short digest of many named tensors, the same on every device: whether weights arrived, and stayed, whole.

Integer arithmetic on the tensors' bits, at the speed of memory: a changed element, whichever and however little, always
changes it; exchanged or otherwise altered ones do but for one case in billions. Not for files or against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

PIECE = 1 << 18
"""Elements at once: few enough for a processor's cache, many enough to keep a GPU busy."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits that depend on every name, dtype, shape and bit, not on order, strides or device."""
    sums = {name: _sum(tensor) for name, tensor in tensors.items()}  # all before the first `int` waits for a device
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(sums):
        tensor = tensors[name]
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {int(sums[name])}\n".encode())
    return whole.hexdigest()


def _sum(tensor: Tensor) -> Tensor:
    """The tensor's bits, each element times an odd number of its own and each piece too, summed modulo 2^64."""
    # Odd factors have inverses modulo 2^64, so a change of one element cannot vanish in the sum.
    bits = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(bits, PIECE):
        total = total * 6364136223846793005 + (piece.to(torch.int64) * factors[: len(piece)]).sum()
    return total


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20261121)
    return (torch.randint(-(2**62), 2**62, (PIECE,), generator=generator) * 2 + 1).to(device)
