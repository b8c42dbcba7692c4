"""One short digest of many named tensors, the same on every device. It shows whether weights arrived, and stayed,
unchanged.

It uses integer arithmetic on the tensors' bits, at the speed of memory. A change of one element always changes it;
exchanged or otherwise altered elements do except for one case in billions. It is not meant for files or against
forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from plaudit.compute.calls import run
from plaudit.compute.library import library

PIECE = 1 << 16
"""Numbers processed together: few enough for a processor's cache, many enough to keep a GPU busy."""
BASE = 6364136223846793005
"""Base of the powers that distinguish pieces; odd."""
INTEGERS = {0: torch.int32, 2: torch.int16}


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
    """Sum the tensor's bits as 32-bit integers modulo 2^64, each times its own odd factor, and each piece too."""
    # Odd factors have inverses modulo 2^64, so a change of one number cannot vanish in the sum.
    bits = _bits(tensor)
    factors = _factors(tensor.device)
    if type(bits) is Tensor and bits.device.type == "cpu" and bits.dtype is torch.int32 and library() is not None:
        total = torch.empty((), dtype=torch.int64, device="cpu")
        run("weighted_sum", bits, factors, total, base=BASE)
        return total
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(bits, PIECE):
        total = total * BASE + (piece.to(torch.int64) * factors[: len(piece)]).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    """View as 32-bit integers, or as 16- or 8-bit ones if the total size requires it."""
    flat = tensor.detach().contiguous().flatten()
    # A view as wider numbers must begin at a multiple of their size and have no gaps, even if it has one number.
    if flat.storage_offset() * flat.element_size() % 4 or flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    return flat.view(INTEGERS.get(len(flat) % 4, torch.uint8))


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Odd factors, all different, so that no two numbers of a piece can be exchanged unnoticed."""
    generator = torch.Generator().manual_seed(20261121)
    low = torch.randint(0, 2**14, (PIECE,), generator=generator, dtype=torch.int32)
    return (torch.randperm(PIECE, generator=generator).to(torch.int32) * 2**15 + low * 2 + 1).to(device)
