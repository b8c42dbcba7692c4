"""What the machine can do at best: the rate of matrix products and of reading memory, a segment whenever asked.

`contender_peak.py THREADS float32|bfloat16` tries three sizes of each and repeats the fastest at every "go".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from gate import Gate

SIZES = (512, 1024, 2048)
MIBS = (8, 32, 128)
SLICE = 0.15
"""Seconds of one measurement."""


def rate(work: float, act: Callable[[], object]) -> float:
    """Work a second while `act` is repeated for a slice of time."""
    act()
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < SLICE:
        act()
        count += 1
    return count * work / elapsed


def product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    """As torch does it by itself: the floor's."""
    a, b, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def packed_product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    """By oneDNN, its second factor laid out for it beforehand: torch takes MKL for float32, which can be slower. In
    float32 where the processor cannot multiply bfloat16."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(b, size)
    return lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")


def reading(mib: int) -> Callable[[], object]:
    """A matrix with 64 rows times a vector: each byte read once, two FLOPs for four bytes."""
    matrix, vector, out = torch.randn(64, mib << 12), torch.randn(mib << 12), torch.empty(64)
    return lambda: torch.mv(matrix, vector, out=out)


def best(work: Callable[[int], float], acts: dict[int, Callable[[], object]]) -> Callable[[], float]:
    """The size that is fastest, as something that measures its rate again."""
    rates = {size: rate(work(size), act) for size, act in acts.items()}
    size = max(rates, key=lambda size: rates[size])
    return lambda: rate(work(size), acts[size])


@torch.inference_mode()
def main() -> None:
    threads, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    gate = Gate(steps=1, repeats=0)
    torch.set_num_threads(threads)
    products = best(lambda size: 2.0 * size**3, {size: product(size, dtype) for size in SIZES})
    readings = best(lambda mib: float(mib << 20), {mib: reading(mib) for mib in MIBS})
    packed = products
    if torch.backends.mkldnn.is_available():
        packed = best(lambda size: 2.0 * size**3, {size: packed_product(size, dtype) for size in SIZES})
    while True:
        gate.say("peak", flops=products(), packed=packed(), bandwidth=readings())
        gate.wait()


if __name__ == "__main__":
    main()
