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
    a, b, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def reading(mib: int) -> Callable[[], object]:
    """A matrix with 64 rows times a vector: each byte read once, two FLOPs for four bytes."""
    matrix, vector, out = torch.randn(64, mib << 12), torch.randn(mib << 12), torch.empty(64)
    return lambda: torch.mv(matrix, vector, out=out)


@torch.inference_mode()
def main() -> None:
    threads, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    gate = Gate(steps=1, repeats=0)
    torch.set_num_threads(threads)
    products = {size: product(size, dtype) for size in SIZES}
    readings = {mib: reading(mib) for mib in MIBS}
    rates = {size: rate(2.0 * size**3, act) for size, act in products.items()}
    speeds = {mib: rate(float(mib << 20), act) for mib, act in readings.items()}
    best, fastest = max(rates, key=lambda size: rates[size]), max(speeds, key=lambda mib: speeds[mib])
    gate.say("peak", flops=rates[best], bandwidth=speeds[fastest])
    while True:
        gate.wait()
        flops = rate(2.0 * best**3, products[best])
        gate.say("peak", flops=flops, bandwidth=rate(float(fastest << 20), readings[fastest]))


if __name__ == "__main__":
    main()
