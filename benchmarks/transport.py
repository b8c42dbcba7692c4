"""How fast new weights reach rollout workers by each way, beside a plain copy: `python benchmarks/transport.py`.

    ranks: pack (flat buckets and their digest) -> deliver -> a worker: digest compared, copied, compared again

Several ranks have equal parts of each tensor's rows, as shards do. Medians over updates through the transports
themselves (`plaudit.weights.transport`), between processes of Ray on this machine; the first update, which makes the
groups of a broadcast, is shown apart. GB/s is the weights' size by the time, whatever the number of workers that got
them. Needs ray.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import KEPT, asked, show
from torch import Tensor

from plaudit.rollout.accepted import Accepted, check_held
from plaudit.runtime.memory import keep_freed_memory
from plaudit.runtime.settings import WEIGHTS, RuntimeSettings
from plaudit.runtime.token import prepare
from plaudit.weights.broadcast import transport_of
from plaudit.weights.collective import Invitation, Receiver, Sender
from plaudit.weights.packed import PackedWeights, PackReport, pack, unpack
from plaudit.weights.pieces import Piece, digest_of_pieces, grouped

WIDTH = 1024
STEPS = ("first update", "pack", "deliver and take", "whole update")


def weights_of(megabytes: int) -> dict[str, Tensor]:
    """Square float32 matrices and as many small vectors, as models have them; the same in every process."""
    count = max(1, megabytes * 2**20 // (WIDTH * WIDTH * 4))
    torch.manual_seed(0)
    matrices = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(count)}
    return matrices | {f"layers.{i}.bias": torch.randn(WIDTH) for i in range(count)}


class Giver:
    """Where a part of the weights is: what `RankProcess` does of it."""

    def __init__(self, megabytes: int, rank: int, ranks: int):
        keep_freed_memory()
        weights, self.sender = weights_of(megabytes), Sender()
        self.meet, self.send, self.dissolve = self.sender.meet, self.sender.send, self.sender.dissolve
        self.specs = {name: (one.dtype, one.shape) for name, one in weights.items()}
        self.digest = digest_of_pieces([Piece.whole(*one) for one in weights.items()], self.specs)
        self.pieces = []
        for name, one in weights.items():
            first, last = (len(one) * part // ranks for part in (rank, rank + 1))
            at = (first, *(0 for _ in one.shape[1:]))
            self.pieces.append(Piece(name, tuple(one.shape), at, one[first:last].clone(), one.dtype))

    def pack_part(self, version: int, part: int) -> tuple[PackedWeights | None, PackReport]:
        if part == 0:
            digest_of_pieces(self.pieces, self.specs)  # the others' part, 8 bytes a tensor, is left out
        parts = grouped(self.pieces)
        packed = pack(parts[part], version, digest=self.digest) if part < len(parts) else None
        return packed, self.given(packed, len(parts))

    def given(self, packed: PackedWeights | None, parts: int) -> PackReport:
        return PackReport(self.digest, parts, size := packed.bytes if packed else 0, size)

    def hold(self, version: int, device: str) -> PackReport:
        digest_of_pieces(self.pieces, self.specs)
        self.sender.packed = pack(self.pieces, version, digest=self.digest, device=device)
        return self.given(self.sender.packed, 1)


class Taker:
    """In another process: tensors like a model's."""

    def __init__(self, megabytes: int):
        keep_freed_memory()
        self.tensors, self.receiver = weights_of(megabytes), Receiver()

    async def load(self, attempt: int, *sent: PackedWeights | Invitation) -> tuple[int, str]:
        packed_parts: list[PackedWeights] = []
        for one in sent:
            packed_parts += [one] if isinstance(one, PackedWeights) else await self.receiver.receive(one)
        arrived, packed = unpack(*packed_parts), packed_parts[0]
        Accepted().check(arrived, packed.version, sent=packed.digest)
        for name, tensor in self.tensors.items():
            tensor.copy_(arrived[name])
        check_held(self.tensors, arrived)
        return packed.version, packed.digest


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_copy(megabytes: int, repeats: int) -> list[float]:
    """Tensor by tensor, in this process."""
    weights = weights_of(megabytes)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return [timed(lambda: [target[name].copy_(tensor) for name, tensor in weights.items()]) for _ in range(repeats)]


async def measure(repeats: int, megabytes: int, workers: int, ranks: int) -> dict[str, list[float]]:
    settings = RuntimeSettings(kind="ray")
    prepare(settings)
    from plaudit.runtime.ray import RayRuntime
    from plaudit.runtime.ray_worker_group import RayWorkerGroup

    runtime = RayRuntime(settings)
    runtime.start()
    found = {"plain copy": plain_copy(megabytes, repeats)}
    try:
        group = runtime.reserve([{"CPU": 0.1}] * (ranks + workers))
        await runtime.placed(group, within=60.0)
        places: Any = {"group": group, "threads": 1}
        worker_group = RayWorkerGroup(
            [await runtime.spawn(Giver, megabytes, n, ranks, name=f"rank {n}", place=n, **places) for n in range(ranks)]
        )
        takers = [
            await runtime.spawn(Taker, megabytes, name=f"taker {n}", place=ranks + n, **places) for n in range(workers)
        ]
        for way in WEIGHTS:
            transport = transport_of(RuntimeSettings(kind="ray", weights=way), gpus=False)
            for version in range(repeats + 1):
                began = time.perf_counter()
                shipment = await transport.pack(worker_group, version)
                packed = time.perf_counter()
                outcomes = await shipment.deliver(takers, 0)
                ended = time.perf_counter()
                assert outcomes == [(version, shipment.digest)] * workers, outcomes
                steps = {"pack": packed - began, "deliver and take": ended - packed, "whole update": ended - began}
                for step, seconds in steps.items() if version else [("first update", ended - began)]:
                    found.setdefault(f"{way}: {step}", []).append(seconds)
    finally:
        runtime.close()
    return found


def rows_of(found: dict[str, list[float]], megabytes: int, workers: int, ranks: int) -> list[dict[str, Any]]:
    """Of the table, one for each way; seconds, and gigabytes a second."""
    gigabytes = megabytes * 2**20 / 1e9
    medians = {name: statistics.median(times) for name, times in found.items()}
    rows = []
    for way in WEIGHTS:
        seconds = {step: f"{medians[f'{way}: {step}']:.3f}" for step in STEPS}
        speeds = {"GB/s": f"{gigabytes / medians[f'{way}: whole update']:.2f}"}
        speeds["plain copy"] = f"{gigabytes / medians['plain copy']:.1f}"
        rows.append({"MB": megabytes, "ranks": ranks, "workers": workers, "way": way} | seconds | speeds)
    return rows


def main() -> None:
    options = asked(
        __doc__,
        mb=([20, 200, 800], "sizes of the weights"),
        workers=([1, 4], "rollout workers that take them"),
        ranks=(1, "ranks that have parts of the weights"),
        repeats=7,
        json=KEPT,
    )
    torch.set_num_threads(1)
    cases = itertools.product(options.mb, options.workers, [options.ranks])
    rows = (row for case in cases for row in rows_of(asyncio.run(measure(options.repeats, *case)), *case))
    show(rows, title="an update of rollout workers, seconds; one thread each", kept=options.json)


if __name__ == "__main__":
    main()
