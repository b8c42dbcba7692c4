"""Memory of a training rank: the whole model on each of two ranks, its shards, half of each matrix, or half of the
layers. Prints a table.

    python benchmarks/sharding.py [--width 512] [--layers 8] [--tokens 1024] [--passes 1]

`held` counts the bytes of weights, gradients and moments that a rank keeps between passes; `peak` is how far its
resident memory rose over two steps above what the process had before there was a model; `bubble` is the share of time
in which stages of a pipeline wait. Left out: loading and saving
(`shares.py`), and speed, which two processes of one machine say nothing of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.ranks import join
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, Whole, local, recompute_layers
from plaudit.learn.shards import Sharded
from plaudit.learn.stages import Staged
from plaudit.learn.tensor import Axes, Cut
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.mesh import Mesh
from plaudit.runtime.memory import keep_freed_memory, release_freed_memory
from plaudit.runtime.network import free_address
from plaudit.runtime.settings import STAGES
from plaudit.types import Role, Row

MODES = {
    "replicate": ("replicate", "float32", False),
    "zero1": ("zero1", "float32", False),
    "zero2": ("zero2", "float32", False),
    "fsdp": ("fsdp", "float32", False),
    "tensor": ("tensor", "float32", False),
    "pipeline": ("pipeline", "float32", False),
    "replicate, recomputed": ("replicate", "float32", True),
    "fsdp, recomputed": ("fsdp", "float32", True),
    "tensor, recomputed": ("tensor", "float32", True),
    "pipeline, recomputed": ("pipeline", "float32", True),
    "replicate, bfloat16": ("replicate", "bfloat16", False),
    "fsdp, bfloat16": ("fsdp", "bfloat16", False),
    "tensor, bfloat16": ("tensor", "bfloat16", False),
    "pipeline, bfloat16": ("pipeline", "bfloat16", False),
}


def resident(field: str) -> float:
    """MiB by this process's own account: VmRSS now, VmHWM at most since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(mode: str, options: argparse.Namespace) -> dict[str, float]:
    strategy, precision, recompute = MODES[mode]
    keep_freed_memory()  # as ranks do
    cpu = torch.device("cpu")
    ranks = join(options.address, options.rank, 2, device=cpu, timeout=300.0)
    stage = STAGES.get(strategy, 0)
    if stage:
        importlib.import_module("torch.distributed.fsdp")  # no part of a model's memory
    cut = strategy in ("tensor", "pipeline")
    axes = Axes.along(ranks, Mesh(**({strategy: 2} if cut else {})), device=cpu, timeout=300.0)
    before = resident("VmRSS")
    config = {
        "model_type": "llama",
        "hidden_size": options.width,
        "intermediate_size": options.width * 43 // 16,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "vocab_size": 768,
    }
    model = fresh_model(config, dtype=getattr(torch, precision), deferred=stage > 0, axis=axes.axis, stage=axes.stage)
    placement: Placement = Whole(model, axes.data)
    if stage:
        placement = Sharded(model, ranks, device=cpu, stage=stage)
    if cut:
        assert isinstance(model, Decoder)
        of_layers = strategy == "pipeline"
        placement = Staged(placement, model, axes.line, ranks) if of_layers else Cut(placement, model, axes.tensor)
    release_freed_memory()
    if recompute:
        recompute_layers(model)
    settings = LearnSettings(precision=precision, micro_tokens=options.tokens // options.passes)
    objective = SFT()
    learner = Learner(
        model,
        Role.POLICY,
        objective.losses()[Role.POLICY],
        optimizer=OptimizerSettings(),
        settings=settings,
        total_steps=9,
        placement=placement,
    )
    Path("/proc/self/clear_refs").write_text("5")
    tokens = torch.randint(768, (2 * options.tokens // 64, 64)).tolist()
    rows = [Row(tokens=tuple(row), trainable=(False, *(True,) * 63), group=0) for row in tokens]
    batch = objective.weigh(Batch.of(rows)).shards(1 if cut else 2)[0 if cut else options.rank]
    for step in range(2):
        stats = learner.prepare(batch, step, 1.0)
        gradients, state = learner.optimizer.collected, learner.optimizer.state()
        kept = [*map(local, model.parameters()), *gradients.values(), *state.values()]
        held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in kept}
        learner.apply(True)
    waits = 100 * stats.get("bubble/policy", 0.0)
    return {"held": sum(held.values()) / 2**20, "peak": resident("VmHWM") - before, "bubble, %": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("width", 512), ("layers", 8), ("tokens", 1024), ("passes", 1), ("rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--address")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank >= 0:
        print(json.dumps(measure(options.mode, options)))
        return
    columns = ("held", "peak", "bubble, %")
    print(f"| two ranks, MiB a rank | {' | '.join(columns)} |\n|---|---|---|---|")
    for mode in MODES:
        address = free_address()
        command = [sys.executable, *sys.argv, "--mode", mode, "--address", address]
        running = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
        ]
        found = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in running]
        print(f"| {mode} | " + " | ".join(f"{max(f[key] for f in found):.0f}" for key in columns) + " |")


if __name__ == "__main__":
    main()
