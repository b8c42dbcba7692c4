"""How fast new weights reach a rollout worker, beside a plain copy: `python benchmarks/transport.py --mb 500`.

Stages of one update, each timed alone, medians: pack (flat buckets and their digest), send (into the object store and
out of it in another process), take (digest compared, copied into a model's tensors). Needs ray.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assent.rollout.accepted import Accepted
from assent.runtime.settings import RuntimeSettings
from assent.runtime.token import prepare
from assent.weights.parcel import Parcel, pack, unpack

WIDTH = 1024


def weights_of(megabytes: int) -> dict[str, Tensor]:
    """Square float32 matrices and as many small vectors, as models have them."""
    count = max(1, megabytes * 2**20 // (WIDTH * WIDTH * 4))
    matrices = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(count)}
    return matrices | {f"layers.{i}.bias": torch.randn(WIDTH) for i in range(count)}


class Taker:
    """In the other process: tensors like a model's."""

    def __init__(self, megabytes: int):
        self.tensors = weights_of(megabytes)

    def receive(self, parcel: Parcel) -> int:
        """The parcel is here, and every page of it can be read."""
        return sum(int(bucket[::4096].sum()) for bucket in parcel.buckets)

    def take(self, parcel: Parcel) -> float:
        began = time.perf_counter()
        arrived = unpack(parcel)
        Accepted().check(arrived, parcel.version, sent=parcel.digest)
        for name, tensor in self.tensors.items():
            tensor.copy_(arrived[name])
        return time.perf_counter() - began


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def measure(megabytes: int, repeats: int) -> dict[str, list[float]]:
    settings = RuntimeSettings(kind="ray", object_store_mb=max(200, 4 * megabytes))
    prepare(settings)
    from assent.runtime.ray import RayRuntime

    weights = weights_of(megabytes)
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    runtime = RayRuntime(settings)
    runtime.start()
    found: dict[str, list[float]] = {"plain copy": [], "pack": [], "send": [], "take": []}
    try:
        group = runtime.reserve([{"CPU": 1.0}])
        await runtime.placed(group, within=60.0)
        worker = await runtime.spawn(Taker, megabytes, name="taker", group=group, place=0, threads=1)
        for version in range(repeats + 1):  # the first is for warming up
            copy = timed(lambda: [target[name].copy_(tensor) for name, tensor in weights.items()])
            began = time.perf_counter()
            parcel = pack(weights, version)
            packed = time.perf_counter() - began
            began = time.perf_counter()
            await worker.call("receive", parcel)
            sent = time.perf_counter() - began
            taken = await worker.call("take", parcel)
            if version:
                for name, seconds in zip(found, (copy, packed, sent, taken), strict=True):
                    found[name].append(seconds)
    finally:
        runtime.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200, help="size of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = asyncio.run(measure(options.mb, options.repeats))
    table = Table(title=f"weights of {options.mb} MB, one thread")
    for title in ("stage", "s", "GB/s"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    rows = {name: statistics.median(seconds) for name, seconds in found.items()}
    rows["whole update"] = sum(rows.values()) - rows["plain copy"]
    for name, seconds in rows.items():
        table.add_row(name, f"{seconds:.3f}", f"{options.mb * 2**20 / 1e9 / seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
