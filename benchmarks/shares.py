"""Memory of a rank that makes, reads, writes and publishes its share of a model, beside what it holds. Prints a table.

    python benchmarks/shares.py [--width 1536] [--layers 8] [--world 2]

`held` is the rank's weights; `peak` is how far its resident memory rose at most above what the process had before there
was a model, and `share` is one as a part of the other. A model is made fresh, written by all ranks, and read again from
one file and from several; GPT-2's matrices are stored transposed, so that a rank's rows are columns of the file. It is
published by each rank's own boxes, and for comparison gathered by rank 0; `out` and `in` are the MiB that the rank
gives and takes. What is published goes to a file, as to an object store, whose memory is not the rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from plaudit.executors.publisher import Publisher
from plaudit.learn.ranks import Ranks, join
from plaudit.learn.sharding import local
from plaudit.learn.shards import Sharded
from plaudit.models.boxes import BUCKET_BYTES
from plaudit.models.load import describe, fresh_model, load_model
from plaudit.models.share import begin_weights, write_weights
from plaudit.runtime.memory import release_freed_memory
from plaudit.runtime.network import free_address
from plaudit.weights.packed import PackedWeights, pack

CASES = {
    "llama, one file": ("llama", 5e9),
    "llama, files of 100 MB": ("llama", 1e8),
    "gpt2, tied and transposed": ("gpt2", 5e9),
}


def resident(field: str) -> float:
    """MiB by this process's own account: VmRSS now, VmHWM at most since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def keys(family: str, options: argparse.Namespace) -> dict[str, Any]:
    if family == "gpt2":
        return {"model_type": "gpt2", "n_embd": options.width, "n_layer": options.layers, "vocab_size": 8003}
    sizes = {"hidden_size": options.width, "intermediate_size": options.width * 8 // 3, "vocab_size": 8003}
    return {"model_type": "llama", **sizes, "num_hidden_layers": options.layers, "num_attention_heads": 12}


def measure(options: argparse.Namespace) -> list[tuple[str, float, float, float, float]]:
    """What was done, MiB held, MiB at most above the process without a model, and MiB given and taken."""
    family, most = CASES[options.case]
    cpu, folder = torch.device("cpu"), Path(options.folder)
    ranks = join(options.address, options.rank, options.world, device=cpu, timeout=300.0)
    warm(ranks)
    before = resident("VmRSS")
    found = []

    def told(what: str, place: Sharded, out: float = 0.0, taken: float = 0.0) -> None:
        held = {p.data_ptr(): p.numel() * p.element_size() for p in map(local, place.model.parameters())}
        peak = resident("VmHWM") - before
        found.append((what, sum(held.values()) / 2**20, peak, out / 2**20, taken / 2**20))
        Path("/proc/self/clear_refs").write_text("5")

    Path("/proc/self/clear_refs").write_text("5")
    place = Sharded(fresh_model(keys(family, options), deferred=True), ranks, device=cpu)
    told("make", place)
    share = place.share()
    assert share is not None
    place.begin(partial(begin_weights, share, folder, most=most))
    write_weights(share, folder, most=most)
    if options.rank == 0:
        describe(place.model, folder, dtype=share.dtype, tokenizer=None)
    told("write", place)
    ranks.total(0.0)
    with Path(options.folder, f"published{options.rank}").open("wb") as store:
        publisher = Publisher(place.model, place, ranks, dtype=share.dtype, device="cpu")
        publisher.begin(1)
        sizes = [given(publisher.pack_part(part), store) for part in range(len(publisher.parts))]
        told("publish", place, sum(sizes))
        whole = place.whole()
        size = 0 if whole is None else given(pack(dict(whole.hf_tensors()), 1), store)
        told("publish, gathered", place, size or sum(sizes), max(0, size - sum(sizes)))
    ranks.total(0.0)
    del place, share, publisher, whole
    gc.collect()
    release_freed_memory()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    told("read", Sharded(load_model(str(folder), deferred=True), ranks, device=cpu))
    return found


def given(packed: PackedWeights | None, store: BinaryIO) -> int:
    """Put packed weights away. Return its bytes."""
    assert packed is not None
    for bucket in packed.buckets:
        store.write(bucket.numpy().data)
    return packed.bytes


def warm(ranks: Ranks) -> None:
    """Load what is no part of a model's memory: libraries at their first use."""
    tiny = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    place = Sharded(fresh_model(tiny | {"intermediate_size": 8}, deferred=True), ranks, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        share = place.share()
        assert share is not None
        begin_weights(share, Path(folder), most=5e9)
        write_weights(share, Path(folder), most=5e9)
        describe(place.model, Path(folder), dtype=share.dtype, tokenizer=None)
        load_model(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("width", 1536), ("layers", 8), ("world", 2), ("rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("case", "address", "folder"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank >= 0:
        print(json.dumps(measure(options)))
        return
    print(f"{options.world} ranks, MiB a rank; a bucket is {BUCKET_BYTES / 2**20:.0f} MiB\n")
    print("| model | | held | peak | share | out | in |\n|---|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            more = ["--case", case, "--address", free_address(held=False), "--folder", folder]
            command = [sys.executable, __file__, "--width", str(options.width), "--layers", str(options.layers)]
            command += ["--world", str(options.world), *more]
            running = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(options.world)
            ]
            found = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in running]
        for rows in zip(*found, strict=True):
            what, held, peak, out, taken = max(rows, key=lambda row: row[2] / row[1])
            moved = f"{out:.0f} | {taken:.0f}" if out else " | "
            print(f"| {case} | {what} | {held:.0f} | {peak:.0f} | {peak / held:.2f} | {moved} |")


if __name__ == "__main__":
    main()
