"""Parameter servers beside replicated ranks: equality, bytes, losses of workers, slow workers, a slow link.

    python benchmarks/servers.py [CASE ...] [--out FILE]     cases: equal, pushes, kill, slow, link

Whole runs (SFT on the demo's comments) of real Ray processes on this machine. The link is a real one: the second island
is a Ray node in a network namespace, behind a token bucket of 10 Mbit/s each way (tc), which needs root. Workers of
`slow` have the pace that `servers_pace.py` gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from faults import HEAD, Kill, Killer
from partition import Island, call, end, joined
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo

MODEL = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
RATE = "10mbit"
Row = tuple[str, str, str]
"""What was measured, the figure, and what was asked for."""


class Bench:
    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0
        size = DemoSize(sft=1200, sft_validation=128, pairs=8, pairs_validation=4, prompts=8, prompts_test=4)
        self.demo: DemoFiles = make_demo(folder / "demo", size=size)

    def train(self, steps: int, *, hooks: Sequence[Any] = (), workers: int = 2, **more: Any) -> Run:
        """A run with so many workers; `more` are settings of the runtime."""
        self.number += 1
        recipe: dict[str, Any] = {
            "method": "sft",
            "name": "run",
            "output": str(self.folder / str(self.number)),
            "threads": 1,
            "plugins": [str(Path(__file__).with_name("servers_pace.py"))],
            "model": {"config": MODEL, "tokenizer": str(self.demo.tokenizer)},
            "data": {
                "train": str(self.demo.sft),
                "validation": str(self.demo.sft_validation),
                "max_tokens": 64,
                "max_prompt_tokens": 40,
            },
            "optimizer": {"learning_rate": 1e-3, "eps": 1e-6, "warmup": 0.1},
            "train": {"steps": steps, "batch_size": 16},
            "evaluate": {"every": steps},
            "log": {"quiet": True, "page": False},
        }
        runtime = {"kind": "ray", "num_training_workers": workers, "backend": "gloo", **more}
        recipe["runtime"] = runtime
        return run(load_settings(recipe), hooks=hooks)

    def served(self, steps: int, *, hooks: Sequence[Any] = (), workers: int = 2, **servers: Any) -> Run:
        return self.train(steps, hooks=hooks, workers=workers, strategy="server", servers=servers)


def furthest(one: Run, other: Run) -> float:
    a, b = (load_file(found.model / "model.safetensors") for found in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def loss(done: Run) -> float:
    return float(done.metrics[-1]["validation/loss"])


def traffic(done: Run, every: int = 1) -> float:
    """Bytes a step, both ways, in whole rounds; without the weights that workers begin with."""
    sizes = [record["servers/bytes/policy"] for record in done.metrics][1:]
    whole = sizes[: len(sizes) // every * every]
    return sum(whole) / len(whole)


def rate(done: Run, skip: int = 2) -> float:
    """Steps a second."""
    times = [record["time"] for record in done.metrics]
    return (len(times) - 1 - skip) / (times[-1] - times[skip])


def equal(bench: Bench) -> Iterator[Row]:
    replicate = bench.train(20)
    one, again = bench.served(20), bench.served(20, count=2)
    yield "weights after 20 steps against replicate, furthest", f"{furthest(replicate, one):.0e}", "1e-6"
    yield "the same again, by two servers, furthest", f"{furthest(one, again):g}", "0"
    yield "steps/s of replicate, of servers", f"{rate(replicate):.1f}, {rate(one):.1f}", ""


def pushes(bench: Bench) -> Iterator[Row]:
    exact = bench.served(64)
    for push, least in (("bfloat16", "2, +-1 %"), ("int8", "3.9, +-1 %")):
        done = bench.served(64, push=push)
        yield f"push={push}: bytes divided by, validation loss", _beside(exact, done), least
    done = bench.served(65, push="int8", local_steps=16, rate=1.0, momentum=0.0)
    yield "int8, local_steps=16, mean: bytes divided by, validation loss", _beside(exact, done, 16), "50"
    done = bench.served(65, push="int8", local_steps=16)
    yield "int8, local_steps=16, Nesterov: bytes divided by, validation loss", _beside(exact, done, 16), "50"


def _beside(exact: Run, done: Run, every: int = 1) -> str:
    change = 100 * (loss(done) / loss(exact) - 1)
    return f"{traffic(exact) / traffic(done, every):.2f}, {loss(done):.4f} against {loss(exact):.4f} ({change:+.1f} %)"


def kill(bench: Bench) -> Iterator[Row]:
    kills = [Kill("rank", "update", 20, which=1)]
    killer, seen = Killer(kills), list[tuple[int, float, float]]()

    async def paused(moment: Any) -> dict[str, float]:
        seen.append((moment.progress.step, time.monotonic(), moment.stats["servers/workers/policy"]))
        if len(seen) > 25 and moment.stats["servers/workers/policy"] < 2:
            time.sleep(0.1)  # so that the run lasts until the new worker is there
        return {}

    with killer.at_work():
        done = bench.served(400, hooks=[killer.hook, paused])
    steps = [step for step, *_ in seen]
    longest = max(after[1] - before[1] for before, after in pairwise(seen[1:]))
    alone = [step for step, _, workers in seen if workers < 2 and step > 20]
    log = (done.folder / "log.txt").read_text()
    yield "a worker of two is killed: steps repeated", str(len(steps) - len(set(steps))), "0"
    yield "seconds until the next step, longest between two steps", f"{kills[0].next_step:.2f}, {longest:.2f}", "2"
    yield "steps by one worker; by two again", f"{len(alone)}; {400 - max(alone)}", ""
    assert "continuing from" not in log


def slow(bench: Bench) -> Iterator[Row]:
    found = {}
    for name, servers in (("all", {}), ("three", {"quorum": 3, "grace": 0.15, "max_stale": 6})):
        os.environ["SERVERS_PACE"] = str(bench.folder / f"pace {name}")
        found[name] = bench.served(60, workers=4, **servers)
    del os.environ["SERVERS_PACE"]
    speeds = {name: rate(done) for name, done in found.items()}
    change = 100 * (loss(found["three"]) / loss(found["all"]) - 1)
    late = median(record["servers/late/policy/max"] for record in found["three"].metrics)
    yield "one of four three times slower: steps/s for all", f"{speeds['all']:.2f}", ""
    yield "for a quorum of three", f"{speeds['three']:.2f} ({speeds['three'] / speeds['all']:.2f} times)", "2 times"
    yield "validation loss", f"{loss(found['three']):.4f} against {loss(found['all']):.4f} ({change:+.1f} %)", "+-2 %"
    yield "turns that the latest push is late, median", f"{late:g}", ""


def link(bench: Bench) -> Iterator[Row]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_cpus": 2})
    island = Island(cluster.address, 2)
    try:
        joined(cluster, 2, island)
        bucket = ("root", "tbf", "rate", RATE, "burst", "64kbit", "latency", "500ms")
        call("tc", "qdisc", "add", "dev", island.link, *bucket)
        call(*island._inside("tc", "qdisc", "add", "dev", "eth0", *bucket))
        there: dict[str, Any] = {"address": cluster.address, "resources_per_worker": {"CPU": 1}}
        there |= {"heartbeat_timeout": 60.0, "collective_timeout": 300.0}
        whole = rate(bench.train(8, workers=4, **there))
        yield f"two islands of two, a link of {RATE}: steps/s of replicate", f"{whole:.2f}", ""
        for servers, steps in (({"push": "int8"}, 16), ({"push": "int8", "local_steps": 16}, 65)):
            more = there | {"strategy": "server", "servers": servers, "mesh": {"data": 2}}
            mine = rate(bench.train(steps, workers=2, **more), skip=0)
            yield f"of servers={servers}", f"{mine:.2f} ({mine / whole:.1f} times)", "5 times"
    finally:
        end([island])
        cluster.shutdown()


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {one.__name__: one for one in (equal, pushes, kill, slow, link)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as kept:
        bench = Bench(Path(kept))
        for name in options.cases or CASES:
            for row in CASES[name](bench):
                rows.append(row)
                print("| " + " | ".join(row) + " |", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
