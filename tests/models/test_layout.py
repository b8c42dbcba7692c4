"""Boxes of the slice table: every number of every stored tensor is held, by whom FSDP2 and the axes say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.models.config import DecoderConfig, HeadKind
from plaudit.models.decoder import Decoder
from plaudit.models.families import FAMILIES, family_of
from plaudit.models.layout import Layout, Slice
from plaudit.models.mesh import Mesh, MeshError, check_mesh, check_tensor, faults, nearest_mesh
from plaudit.models.parts import shapes
from plaudit.models.settings import LoraSettings

FAMILY = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
HEADS: tuple[HeadKind, ...] = ("lm", "scalar")


@st.composite
def configs(draw: Any) -> DecoderConfig:
    """Any family with any biases, ties, numbers of key-value heads and odd vocabularies."""
    gpt2 = (family := draw(st.sampled_from(FAMILY))) == "gpt2"
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    unit = draw(st.sampled_from((1, 4, 12)))  # small numbers that axes divide are rare otherwise
    heads = kv_heads * (1 if gpt2 else draw(st.sampled_from((1, 2, 3))))
    return DecoderConfig(
        family=family,
        vocab_size=unit * draw(st.integers(1, 9)),
        width=draw(st.integers(1, 12)),
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        mlp_width=unit * draw(st.integers(1, 3)),
        max_positions=5,
        positions="learned" if gpt2 else "rotary",
        norm="layer" if gpt2 else "rms",
        norm_eps=1e-5,
        mlp="plain" if gpt2 else "gated",
        activation="silu",
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        qk_norm=family == "qwen3",
    )


AXIS = st.integers(1, 4)
AXES = {"replicas": st.integers(1, 2), "data": st.integers(1, 5), "context": AXIS, "tensor": AXIS, "pipeline": AXIS}
MESHES = st.builds(Mesh, **AXES, spans=st.integers(1, 2))
CASES = (configs(), st.sampled_from(HEADS), MESHES)


def fitted(config: DecoderConfig, mesh: Mesh) -> Mesh:
    return mesh if not faults(config, mesh) else nearest_mesh(config, mesh, mesh.world)


def index(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in box)


@given(*CASES)
def test_boxes_cover_each_stored_tensor_once_a_replica(config: DecoderConfig, head: HeadKind, mesh: Mesh) -> None:
    """And those that a rank is the first to hold cover it once in all: these are saved."""
    layout = Layout(config, head, mesh := fitted(config, mesh))
    counts: dict[int, dict[str, Any]] = {}
    saved = covered(layout, ())
    for rank in range(mesh.world):
        place = mesh.place(rank)
        held = counts.setdefault(place.replica, covered(layout, ()))
        for one in layout.slices(rank):
            assert all(start < stop for start, stop in one.box)
            held[one.name][index(one.box)] += 1
            saved[one.name][index(one.box)] += one.first
    assert len(counts) == mesh.replicas
    family = family_of(config.family)
    for held in counts.values():
        for name, count in held.items():
            ours = layout.parts[name].ours
            copies = mesh.tensor if copied(ours, head) else 1
            tied = ours == "embedding.weight" and head == "lm" and config.tied and mesh.pipeline > 1
            assert (count == copies * (2 if tied else 1)).all(), (name, count)
    assert all((count == 1).all() for count in saved.values())
    assert (f"{family.lm_head}.weight" in saved) == (head == "lm" and not config.tied)


def copied(ours: str, head: HeadKind) -> bool:
    """Copies on all tensor ranks: what stands after the sum over ranks, or is no matrix product."""
    after = ("output.bias", "down.bias", "norm.weight", "norm.bias", "position_embedding.weight")
    return ours.endswith(after) or (ours == "head.weight" and head == "scalar")


@given(*CASES)
def test_slices_fill_a_ranks_parameters(config: DecoderConfig, head: HeadKind, mesh: Mesh) -> None:
    """The places of a rank's slices cover its part of each parameter once, and nothing beyond."""
    layout = Layout(config, head, mesh := fitted(config, mesh))
    for rank in range(mesh.world):
        place = mesh.place(rank)
        filled = {
            ours: np.zeros(layout.shape(ours, place), int)
            for ours in layout.parameters
            if place.stage in layout.stages(ours)
        }
        for one in layout.slices(rank):
            target = filled[one.ours][tuple(slice(a, a + n) for a, n in zip(one.at, one.sizes, strict=True))]
            assert target.shape == one.sizes
            target += 1
        assert all((count == 1).all() for count in filled.values())


@given(*CASES, st.booleans())
def test_pieces_cover_parameters_and_adapters(config: DecoderConfig, head: HeadKind, mesh: Mesh, some: bool) -> None:
    """The whole once, or once a tensor rank where it is copied, and each rank's part once."""
    mesh = replace(fitted(config, mesh), replicas=1)
    targets = (["c_attn", "c_proj"] if config.family == "gpt2" else ["k_proj", "down_proj"]) if some else []
    layout = Layout(config, head, mesh, LoraSettings(rank=3, targets=targets))
    assert len(layout.adapters) >= 2 * config.layers
    for ours in (*layout.parameters, *layout.adapters):
        whole = np.zeros(layout.whole(ours), int)
        for place in (place for place in map(mesh.place, range(mesh.world)) if place.stage == layout.stages(ours)[0]):
            part = np.zeros(layout.shape(ours, place), int)
            for piece in layout.pieces(ours, place):
                whole[index(piece.box)] += 1
                part[tuple(slice(at, at + size) for at, size in zip(piece.at, piece.sizes, strict=True))] += 1
            assert (part == 1).all()
        assert (whole == (mesh.tensor if layout.copied(ours) else 1)).all(), ours


def values(layout: Layout) -> dict[str, Any]:
    """Stored tensors in which every number is another one."""
    found, begin = {}, 0
    for name, shape in layout.stored.items():
        size = int(np.prod(shape))
        found[name] = np.arange(begin, begin + size).reshape(shape)
        begin += size
    return found


def ours(layout: Layout, stored: dict[str, Any]) -> dict[str, Any]:
    """Whole parameters of ours, by the families' tables."""
    found = {name: np.zeros(shape, int) for name, shape in layout.parameters.items()}
    for name, part in layout.parts.items():
        rows = found[part.ours][part.start : part.start + (part.size or layout.parameters[part.ours][0])]
        rows[...] = stored[name].T if part.transposed else stored[name]
    return found


def local(layout: Layout, rank: int, stored: dict[str, Any]) -> dict[str, Any]:
    place = layout.mesh.place(rank)
    found = {n: np.full(layout.shape(n, place), -1) for n in layout.parameters if place.stage in layout.stages(n)}
    for one in layout.slices(rank):
        box = stored[one.name][index(one.box)]
        target = tuple(slice(a, a + n) for a, n in zip(one.at, one.sizes, strict=True))
        found[one.ours][target] = box.T if one.transposed else box
    return found


@given(configs(), st.sampled_from(HEADS), st.integers(1, 7))
def test_the_data_axis_is_what_fsdp2_holds(config: DecoderConfig, head: HeadKind, world: int) -> None:
    """Chunks of dimension 0 of each parameter, by torch's own rule."""
    layout = Layout(config, head, Mesh(data=world))
    whole = ours(layout, values(layout))
    for rank in range(world):
        for name, part in local(layout, rank, values(layout)).items():
            chunks = torch.chunk(torch.from_numpy(whole[name]), world)
            expected = chunks[rank].numpy() if rank < len(chunks) else whole[name][:0]
            np.testing.assert_array_equal(part, expected, err_msg=name)


@given(configs(), st.integers(2, 4))
def test_a_tensor_rank_has_whole_heads(config: DecoderConfig, tensor: int) -> None:
    """Its part of the fused projection is that of a smaller model: its query heads, then their keys, then values."""
    mesh = next(mesh for t in range(tensor, 0, -1) if not faults(config, mesh := Mesh(tensor=t)))
    layout = Layout(config, "lm", mesh)
    t, dim = mesh.tensor, config.head_dim
    query, key = config.heads * dim, config.kv_heads * dim
    whole = ours(layout, values(layout))["layers.0.attention.qkv.weight"]
    for rank in range(t):
        part = local(layout, rank, values(layout))["layers.0.attention.qkv.weight"]
        pieces = [np.split(piece, t)[rank] for piece in np.split(whole, [query, query + key])]
        np.testing.assert_array_equal(part, np.concatenate(pieces))


@given(*CASES)
def test_shapes_are_those_of_the_decoder(config: DecoderConfig, head: HeadKind, mesh: Mesh) -> None:
    with torch.device("meta"):
        model = Decoder(config, head=head)
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(shapes(config, head).items()) == list(found.items())
    assert Layout(config, head).stored == {name: tuple(tensor.shape) for name, tensor in model.hf_tensors()}


def small(**changes: Any) -> DecoderConfig:
    llama = DecoderConfig(
        family="llama",
        vocab_size=40,
        width=8,
        layers=6,
        heads=8,
        kv_heads=4,
        head_dim=2,
        mlp_width=24,
        max_positions=8,
        positions="rotary",
        norm="rms",
        norm_eps=1e-5,
        mlp="gated",
        activation="silu",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied=False,
    )
    return replace(llama, **changes)


@pytest.mark.parametrize(
    ("mesh", "changes", "world", "reason", "near"),
    [
        (Mesh(tensor=3), {}, 3, "tensor=3 .* 8 attention", "data=3"),
        (Mesh(tensor=8), {}, 8, "tensor=8 .* 4 key-value", "data=2 tensor=4"),
        (Mesh(context=8), {}, 8, "context=8 .* 4 key-value", "data=2 context=4"),
        (Mesh(tensor=2, context=4), {}, 8, "tensor=2 .*context=4 .* 4 key", "data=2 context=4"),
        (Mesh(tensor=4), {"mlp_width": 22}, 4, "tensor=4 .* 22 channels", "data=2 tensor=2"),
        (Mesh(tensor=2), {"vocab_size": 41}, 2, "tensor=2 .* 41 tokens", "data=2"),
        (Mesh(pipeline=4), {}, 4, "pipeline=4 .* 6 layers", "data=2 pipeline=2"),
        (Mesh(data=2, tensor=2), {}, 8, "4 ranks, .* 8", "data=4 tensor=2|data=2 tensor=4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_nearest_that_does(
    mesh: Mesh, changes: dict[str, Any], world: int, reason: str, near: str
) -> None:
    with pytest.raises(MeshError, match=rf"{reason}.*Take .*({near})"):
        check_mesh(small(**changes), mesh, world)


@pytest.mark.parametrize(
    ("tensor", "changes", "near"),
    [(3, {}, 4), (8, {}, 4), (6, {"heads": 12, "kv_heads": 12, "mlp_width": 24, "vocab_size": 44}, 4), (5, {}, 4)],
)
def test_a_tensor_axis_without_others_is_refused_with_the_nearest_size(
    tensor: int, changes: dict[str, Any], near: int
) -> None:
    config = small(**changes)
    with pytest.raises(MeshError, match=rf"tensor={tensor} does not divide.* Take {near}\."):
        check_tensor(config, Mesh(tensor=tensor))
    check_tensor(config, Mesh(tensor=near))


@given(configs(), MESHES, st.integers(1, 24))
def test_the_nearest_mesh_fits(config: DecoderConfig, mesh: Mesh, world: int) -> None:
    found = nearest_mesh(config, mesh, world)
    assert found.world == world
    assert not faults(config, found)
    if mesh.world == world and not faults(config, mesh):
        assert found == mesh
        check_mesh(config, mesh, world)
    else:
        with pytest.raises(MeshError):
            check_mesh(config, mesh, world)


def test_an_axis_without_ranks_is_refused() -> None:
    with pytest.raises(MeshError, match="tensor=0"):
        Mesh(tensor=0)
    with pytest.raises(MeshError, match="ranks 0 to 1"):
        Mesh(data=2).place(2)


def covered(layout: Layout, slices: Iterator[Slice] | tuple[()]) -> dict[str, Any]:
    found = {name: np.zeros(shape, int) for name, shape in layout.stored.items()}
    for one in slices:
        found[one.name][index(one.box)] = 1
    return found


def test_the_table_needs_no_torch(environment: dict[str, str]) -> None:
    script = "import sys, plaudit.models.moves; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_every_native_family_is_tried() -> None:
    assert {name for name in FAMILIES if not name.startswith("my")} >= set(FAMILY)
