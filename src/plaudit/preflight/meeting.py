"""Time collectives between two processes: `python -P meeting.py` prints the results as JSON. Imports only torch.

`-P` keeps this folder's names, such as `profile`, from standing for those of the standard library.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = (1 << 10, 1 << 22)
"""Bytes of the two timed messages: the first gives the latency, the second the bandwidth."""
TIMES = 20
WORK = 0.25
"""Seconds for which matrix products are timed, on one core and on both."""


def main() -> None:
    if len(sys.argv) > 1:
        _meet(sys.argv[1], 1)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/meeting"
        with subprocess.Popen([sys.executable, "-P", __file__, path]):
            print(json.dumps(_meet(path, 0)))


def _meet(path: str, rank: int) -> dict[str, object]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found: dict[str, object] = {}
    for name, ask in (("all_reduce", _reduce), ("all_gather", _gather)):
        small, large = (_seconds(ask, size) for size in SIZES)
        found[name] = (small, (SIZES[1] - SIZES[0]) / max(large - small, 1e-7))
    first = _products() if rank == 0 else 0.0
    dist.barrier()
    both = _products()
    dist.barrier()
    found["crowded"] = first / both if rank == 0 else 1.0
    dist.destroy_process_group()
    return found


def _reduce(size: int) -> None:
    dist.all_reduce(torch.ones(size // 4))


def _gather(size: int) -> None:
    mine = torch.ones(size // 4)
    dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)


def _seconds(work: Callable[[int], None], size: int) -> float:
    for _ in range(3):
        work(size)
    begun = time.perf_counter()
    for _ in range(TIMES):
        work(size)
    return (time.perf_counter() - begun) / TIMES


def _products() -> float:
    """Return how many products of 1024 x 1024 matrices this process computes a second."""
    left = torch.ones(1024, 1024)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < WORK:
        left @ left
        count += 1
    return count / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
