"""One short digest of many named tensors, the same on every device. It shows whether weights arrived, and stayed,
unchanged.

It is integer arithmetic on the tensors' bits, at the speed of memory: a sum modulo 2^64 of 32-bit integers (16- or
8-bit ones if the total size requires it), each times its own odd factor, and each piece of them times a power. Odd
factors have inverses, so a change of one element always changes the sum; exchanged or otherwise altered elements change
it except in one case in billions. Processes that hold boxes of tensors can sum their own boxes. It is not meant for
files or against forgery.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from plaudit.compute.calls import run
from plaudit.compute.library import library

PIECE = 1 << 16
"""Numbers processed together: few enough for a processor's cache, many enough to keep a GPU busy."""
BASE = 6364136223846793005
"""Odd base of the powers by which the sums of pieces are multiplied, so that their order matters."""


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits that depend on every name, dtype, shape and bit, but not on order, strides or device."""
    # All sums before the first `int` waits for a device.
    sums = {name: (one.dtype, one.shape, box_sum(one, one.shape, [0] * one.dim())) for name, one in tensors.items()}
    return digest_of({name: (dtype, shape, int(one)) for name, (dtype, shape, one) in sums.items()})


def digest_of(sums: Mapping[str, tuple[torch.dtype, Sequence[int], int]]) -> str:
    """Return the digest of tensors from {name: (dtype, whole shape, sum of the `box_sum`s of all of its boxes)}."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(sums):
        dtype, shape, one = sums[name]
        whole.update(f"{name} {dtype} {tuple(shape)} {one}\n".encode())
    return whole.hexdigest()


@torch.no_grad()
def box_sum(values: Tensor, shape: Sequence[int], at: Sequence[int]) -> Tensor:
    """Return the term () of a box, which begins at index `at`, in the sum of a tensor of this shape. The terms of all
    boxes of a tensor add up to its sum, modulo 2^64. A box must have whole rows, or two dimensions."""
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    count, size = math.prod(shape), values.element_size()
    width = shape[1] if values.dim() == 2 else 1
    first = sum(begin * math.prod(shape[axis + 1 :]) for axis, begin in enumerate(at))
    rows = values.detach() if values.dim() == 2 and values.shape[1] < width else values.detach().reshape(1, -1)
    wide = {0: 4, 2: 2}.get(count * size % 4, 1)  # bytes of a number
    edges = (first, rows.shape[1], *([width] if len(rows) > 1 else []))
    if any(edge * size % wide for edge in edges):
        return _strewn(rows, first, width, count, wide // size)
    bits = _bits(rows, wide)
    first, width, count = (number * size // wide for number in (first, width, count))
    if type(bits) is Tensor and bits.device.type == "cpu" and wide == 4 and library() is not None:
        total = torch.empty((), dtype=torch.int64, device="cpu")
        run("weighted_sum", bits, _factors(bits.device), total, width=width, first=first, count=count, base=BASE)
        return total
    if len(bits) > 1:
        return _strewn(bits, first, width, count, 1)
    total, factors = torch.zeros((), dtype=torch.int64, device=bits.device), _factors(bits.device)
    head = min(-first % PIECE, count)
    for piece in (bits[0, :head], *torch.split(bits[0, head:], PIECE)):
        there = first % PIECE
        found = (piece.to(torch.int64) * factors[there : there + len(piece)]).sum()
        total = total + found * _power(first, count)
        first += len(piece)
    return total


def _strewn(rows: Tensor, first: int, width: int, count: int, each: int) -> Tensor:
    """Return the sum of rows that begin `width` elements apart in a tensor of `count`; a number has `each` elements."""
    numbers, device = rows.contiguous(), rows.device
    if each > 1:
        numbers = numbers.view({1: torch.int8, 2: torch.int16}[rows.element_size()])
    bits, total = 8 * rows.element_size(), torch.zeros((), dtype=torch.int64, device=device)
    factors, count = _factors(device), -(-count // each)
    for begin in range(0, len(rows), step := max(1, PIECE // max(1, rows.shape[1]))):
        some = numbers[begin : begin + step].to(torch.int64)
        place = first + torch.arange(begin, begin + len(some), device=device)[:, None] * width
        place = place + torch.arange(rows.shape[1], device=device)
        number, turn = place // each, place % each
        # The last element of a number carries its sign, earlier ones are its lower bits.
        some = torch.where(turn < each - 1, some & (2**bits - 1), some) << turn * bits
        pieces = range(int(number.min()) // PIECE, int(number.max()) // PIECE + 1)
        powers = torch.tensor([_power(piece * PIECE, count) for piece in pieces], device=device)
        total += (some * factors[number % PIECE] * powers[number // PIECE - pieces.start]).sum()
    return total


def _power(number: int, count: int) -> int:
    """Return the factor, as a signed 64-bit integer, of the piece that has the number at this index among `count`."""
    found = pow(BASE, (count - 1) // PIECE - number // PIECE, 1 << 64)
    return found - (found >> 63 << 64)


def _bits(rows: Tensor, wide: int) -> Tensor:
    """Return rows viewed as integers of `wide` bytes, copied first if strides or offset do not allow a view."""
    # A view as wider numbers must begin at a multiple of their size and have no gaps, even if it has one number.
    starts = (rows.storage_offset(), rows.stride(0))
    if rows.stride(1) != 1 or any(start * rows.element_size() % wide for start in starts):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[wide])


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Return PIECE odd factors, all different, so that an exchange of two numbers of a piece changes the sum."""
    generator = torch.Generator().manual_seed(20261121)
    low = torch.randint(0, 2**14, (PIECE,), generator=generator, dtype=torch.int32)
    return (torch.randperm(PIECE, generator=generator).to(torch.int32) * 2**15 + low * 2 + 1).to(device)
