"""Memory of a training rank: the whole model on each of two ranks, its shards, half of each matrix, of each pass or of
the layers. Prints a table.

    python benchmarks/sharding.py [--width 512] [--layers 8] [--tokens 1024] [--passes 1] [--only MODE ...]

`held` counts the bytes of weights, gradients and moments that a rank keeps between passes; `kept`, those that a pass
keeps for its backward pass; `peak` is how far its resident memory rose over two steps above what the process had before
there was a model; `bubble` is the share of time in which stages of a pipeline wait. Left out: speed, which processes of
one machine say nothing of.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from harness import KEPT, asked, forget_peak, in_ranks, resident, show
from torch import Tensor

from plaudit.algorithms.sft import SFT
from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.ranks import join
from plaudit.learn.settings import LearnSettings, OptimizerSettings
from plaudit.learn.sharding import Placement, Whole, local, recompute_layers
from plaudit.learn.shards import Sharded
from plaudit.learn.stages import Staged
from plaudit.learn.tensor import Axes, Cut
from plaudit.models.base import LanguageModel
from plaudit.models.decoder import Decoder
from plaudit.models.load import fresh_model
from plaudit.models.mesh import Mesh
from plaudit.runtime.memory import keep_freed_memory, release_freed_memory
from plaudit.runtime.network import free_address
from plaudit.runtime.settings import STAGES
from plaudit.types import Role, Row

STRATEGIES = {
    "": "alone replicate zero1 zero2 fsdp tensor context pipeline",
    "recomputed": "alone replicate fsdp tensor context pipeline",
    "bfloat16": "alone replicate fsdp tensor context pipeline",
}
"""What differs from float32 without recomputed layers -> strategies that are measured so."""
MODES = {
    f"{'one rank, all rows' if name == 'alone' else name}{how and ', '}{how}": (name, how)
    for how, names in STRATEGIES.items()
    for name in names.split()
}


class Kept:
    """Bytes that each forward pass keeps for its backward pass; of a layer that is recomputed, its input."""

    def __init__(self, model: LanguageModel, recomputed: bool):
        assert isinstance(model, Decoder)
        self.passes: list[dict[int, int]] = []
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        model.register_forward_pre_hook(lambda *_: self.passes.append({}))
        for block in model.layers:
            block.register_forward_pre_hook(lambda _, given: self.see(given[0]))
            if not recomputed:  # what matrices get: ranks of the tensor axis keep their runs of it
                for norm in (block.attention_norm, block.mlp_norm):
                    norm.register_forward_hook(lambda _, given, found: self.see(found))

    def see(self, tensor: Tensor) -> None:
        self.pack(tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self.own:
            self.passes[-1][memory.data_ptr()] = memory.nbytes()
        return tensor

    def most(self) -> int:
        return max(sum(one.values()) for one in self.passes)


def measure(mode: str, options: argparse.Namespace) -> dict[str, float]:
    strategy, how = MODES[mode]
    precision, recompute = "bfloat16" if how == "bfloat16" else "float32", how == "recomputed"
    keep_freed_memory()  # as ranks do
    cpu = torch.device("cpu")
    world = 1 if strategy == "alone" else 2
    ranks = join(options.address, options.rank, world, device=cpu, timeout=300.0)
    stage = STAGES.get(strategy, 0)
    if stage:
        importlib.import_module("torch.distributed.fsdp")  # no part of a model's memory
    axes = ("tensor", "context", "pipeline")
    mesh = Mesh(**({strategy: 2} if strategy in axes else {}))
    along = Axes.along(ranks, mesh, device=cpu, timeout=300.0)
    before = resident("VmRSS")
    config = {
        "model_type": "llama",
        "hidden_size": options.width,
        "intermediate_size": options.width * 43 // 16,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "vocab_size": 768,
    }
    placed: dict[str, Any] = {"deferred": stage > 0, "axis": along.axis, "stage": along.stage}
    model = fresh_model(config, dtype=getattr(torch, precision), **placed)
    model.context_axis = along.context
    placement: Placement = Whole(model, along.data)
    if stage:
        placement = Sharded(model, ranks, device=cpu, stage=stage)
    if strategy == "tensor":
        assert isinstance(model, Decoder)
        placement = Cut(placement, model, along.tensor)
    if strategy == "pipeline":
        assert isinstance(model, Decoder)
        placement = Staged(placement, model, along.line, ranks)
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
    kept = None if stage else Kept(model, recompute)  # shards' gathered layers come and go
    forget_peak()
    tokens = torch.randint(768, (2 * options.tokens // 64, 64)).tolist()
    rows = [Row(tokens=tuple(row), trainable=(False, *(True,) * 63), group=0) for row in tokens]
    shards = 1 if world == 1 or strategy in axes else 2
    batch = objective.weigh(Batch.of(rows)).shards(shards)[options.rank % shards]
    for step in range(2):
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x) if kept else nullcontext():
            stats = learner.prepare(batch, step, 1.0)
        gradients, state = learner.optimizer.collected, learner.optimizer.state()
        own = [*map(local, model.parameters()), *gradients.values(), *state.values()]
        held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in own}
        learner.apply(True)
    return {
        "held": sum(held.values()) / 2**20,
        "kept": kept.most() / 2**20 if kept else 0.0,
        "peak": resident("VmHWM") - before,
        "bubble, %": 100 * stats.get("bubble/policy", 0.0),
    }


def main() -> None:
    inside = {"mode": "", "address": "", "rank": (-1, "of a process that this one starts")}
    options = asked(__doc__, width=512, layers=8, tokens=1024, passes=1, only=[*MODES], json=KEPT, **inside)
    torch.set_num_threads(1)
    if options.rank >= 0:
        print(json.dumps(measure(options.mode, options)))
        return
    show(of_modes(options), kept=options.json)


def of_modes(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The largest figures of any rank."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("width", "layers", "tokens", "passes")]
    for mode in options.only:
        world = 1 if MODES[mode][0] == "alone" else 2
        found = in_ranks(world, *sizes, "--mode", mode, "--address", free_address(held=False))
        most = {key: f"{max(one[key] for one in found):.0f}" for key in ("held", "kept", "peak", "bubble, %")}
        yield {"two ranks, MiB a rank": mode} | most


if __name__ == "__main__":
    main()
