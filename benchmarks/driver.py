"""What thousands of workers cost the driver: `python benchmarks/driver.py`.

    choice      one request to the least busy worker, and its end       microseconds
    heartbeats  real calls of Ray, four in runtime.heartbeat_timeout    share of one core of the driver

The workers are made up, but for one process that answers for all, so that messages are real. Nodes have 8 workers; a
line `each asked` puts each worker on a node of its own, as if nobody could vouch for another. Needs ray.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from types import SimpleNamespace
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from plaudit.runtime.places import Places
from plaudit.runtime.ray import RayRuntime
from plaudit.runtime.ray_worker import Hearts, RayWorker
from plaudit.runtime.settings import RuntimeSettings

SIZES = (64, 512, 4096)
A_NODE = 8
WIDTH = 16
"""Requests that each worker has at a time."""


async def choice(count: int, requests: int) -> float:
    """Microseconds of the driver for each request, while each worker has some."""

    async def start(number: int) -> Any:
        gone = asyncio.get_running_loop().create_future()
        return SimpleNamespace(name=f"worker {number}", gone=lambda: gone, kill=lambda reason="": None)

    places = Places[Any](start, count, work="requests", patience=60.0, none="none", failures=lambda lost: None)
    places.open()
    await places.counted()
    asked = 0

    async def ask(worker: Any) -> None:
        await asyncio.sleep(0)

    async def one() -> None:
        nonlocal asked
        while asked < requests:
            asked += 1
            await places.asked(64 + asked % 192, ask)

    begun = time.process_time()
    await asyncio.gather(*(one() for _ in range(min(requests, WIDTH * count))))
    taken = time.process_time() - begun
    places.close("the pool was")
    return 1e6 * taken / requests


async def heartbeats(runtime: RayRuntime, count: int, a_node: int, seconds: float) -> float:
    """Share of a core that the driver spends."""
    settings = runtime.settings
    group = runtime.reserve([{"CPU": 1.0}])
    await runtime.placed(group, within=60.0)
    real = await runtime.spawn(dict, name="answers for all", group=group, place=0, threads=1)
    hearts = Hearts()
    for number in range(count):
        worker = RayWorker[Any](f"worker {number}", real._actor, settings)
        worker.pid, worker.node = real.pid, f"node {number // a_node}"
        hearts.add(worker)
    await asyncio.sleep(settings.heartbeat_timeout / 4)  # all begin at once
    begun, clock = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (time.process_time() - begun) / (time.perf_counter() - clock)
    hearts.close()
    runtime.end_workers()
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats that are counted")
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    Console(width=100).print(f"Ray {ray.__version__}", asyncio.run(measured(options)))


async def measured(options: argparse.Namespace) -> Table:
    table = Table("workers", "choice, us a request", "heartbeats, each asked", "heartbeats, 8 a node")
    runtime = RayRuntime(RuntimeSettings(kind="ray"))
    runtime.start()
    try:
        for count in options.sizes:
            chosen = await choice(count, options.requests)
            each, together = [await heartbeats(runtime, count, a_node, options.seconds) for a_node in (1, A_NODE)]
            table.add_row(f"{count:,}", f"{chosen:.1f}", f"{each:.1%}", f"{together:.1%}")
    finally:
        runtime.close()
    return table


if __name__ == "__main__":
    main()
