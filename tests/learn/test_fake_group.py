"""Models that no machine here holds, on meshes of up to 4,096 ranks: a rank makes its part, without memory, by the code
that trains, over torch's fake process group. It holds what the slice table says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from fits import CONFIGS
from torch.testing._internal.distributed.fake_pg import FakeStore

from plaudit.learn.ranks import Together
from plaudit.learn.sharding import local
from plaudit.learn.shards import Sharded
from plaudit.learn.tensor import Axes
from plaudit.models.decoder import Decoder
from plaudit.models.families import read_config
from plaudit.models.layout import Layout
from plaudit.models.mesh import Mesh

CPU = torch.device("cpu")
MESHES = {
    "GPT-2": Mesh(data=8),
    "Llama 3 8B": Mesh(data=64),
    "Qwen3 32B": Mesh(replicas=2, data=16, tensor=8),
    "Llama 3 70B": Mesh(replicas=8, tensor=4, pipeline=16),
    "Llama 3 405B": Mesh(replicas=2, data=128, tensor=8, pipeline=2),
}
"""What is held: `data` ranks have shards, `replicas` have copies."""


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def made(name: str, mesh: Mesh) -> Decoder:
    """This rank's part: as `executors.trainer.Trainer` makes it."""
    replicas = mesh.replicas if mesh.data > 1 else 1
    axes = Axes.along(Together(CPU), mesh, device=CPU, timeout=60.0, replicas=replicas)
    model = Decoder.empty(
        read_config(CONFIGS[name]), head="lm", dtype=torch.bfloat16, device=None, axis=axes.axis, stage=axes.stage
    )
    model.pending = None  # nor will it have values, for which its placement would make room
    if mesh.data > 1:
        Sharded(model, axes.data, device=CPU, grid=axes.grid)
    return model


@pytest.mark.parametrize("where", [min, lambda ranks: ranks[len(ranks) // 3], max], ids=["first", "third", "last"])
@pytest.mark.parametrize("name", MESHES)
def test_a_rank_holds_what_the_table_says(name: str, where: Callable[[range], int]) -> None:
    mesh = MESHES[name]
    rank = where(range(mesh.world))
    with fake_group(rank, mesh.world):
        model = made(name, mesh)
        held = {ours: local(tensor).numel() for ours, tensor in model.named_parameters()}
        assert all(tensor.is_meta for tensor in model.parameters()), "nothing was allocated"
    layout = Layout(read_config(CONFIGS[name]), "lm", mesh)
    said = dict.fromkeys(held, 0)
    for one in layout.slices(rank):
        said[one.ours] += math.prod(one.sizes)
    assert held == said
    assert sum(held.values()) > 0
