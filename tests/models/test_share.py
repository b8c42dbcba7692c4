"""Shares of any mesh hold what the whole model holds, bit for bit, and need no more memory than a bucket beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.models import boxes, share
from plaudit.models.boxes import read_box, stored_in
from plaudit.models.config import HeadKind
from plaudit.models.decoder import Decoder
from plaudit.models.families import read_config
from plaudit.models.files import weight_files
from plaudit.models.fresh import generator
from plaudit.models.layout import Layout, Slice
from plaudit.models.load import fresh_model, load_model, save_model
from plaudit.models.lora import add_lora, load_lora, merge_lora, restore_lora, save_lora
from plaudit.models.mesh import Mesh
from plaudit.models.settings import LoraSettings
from plaudit.models.share import Share, begin_weights, draw_weights, merged, read_weights, write_weights

Tiny = Callable[..., dict[str, Any]]
MESHES = [Mesh(data=3), Mesh(data=5), Mesh(data=2, tensor=2), Mesh(tensor=2, pipeline=2), Mesh(replicas=2, context=2)]
FAMILIES = ("gpt2", "llama", "qwen3")


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few rows, so that every tensor takes several."""
    for module in (boxes, share):
        monkeypatch.setattr(module, "BUCKET_BYTES", 600)


def empty(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> Share:
    place = layout.mesh.place(rank)
    held = (ours for ours in layout.parameters if place.stage in layout.stages(ours))
    tensors = {ours: torch.full(layout.shape(ours, place), math.nan, dtype=dtype) for ours in held}
    return Share(layout, rank, tensors, dtype)


def box_of(one: Slice, whole: Tensor) -> Tensor:
    for dimension, (start, size) in enumerate(zip(one.start, one.sizes, strict=True)):
        whole = whole.narrow(dimension, start, size)
    return whole


def assert_part_of(mine: Share, whole: dict[str, Tensor]) -> None:
    """Each slice is that box of the whole parameter, and no number of the rank's is left unset."""
    for one, held in mine.slices():
        assert torch.equal(held, box_of(one, whole[one.ours])), one
    assert not any(tensor.isnan().any() for tensor in mine.tensors.values())


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_fresh_model_is_the_same_in_any_mesh(model_type: str, mesh: Mesh, tiny: Tiny) -> None:
    keys = tiny(model_type, vocab_size=96)
    whole = parameters(fresh_model(keys, seed=3))
    for rank in range(mesh.world):
        mine = empty(Layout(read_config(keys), "lm", mesh), rank)
        draw_weights(mine, dtype=torch.float32, seed=3)
        assert_part_of(mine, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_pieces_are_drawn_as_whole_parameters_are(head: HeadKind, dtype: torch.dtype) -> None:
    """33 rows of 6 leave 6 numbers after two buckets: fewer than torch's generator takes together."""
    sizes = {"vocab_size": 33, "hidden_size": 6, "intermediate_size": 35, "num_hidden_layers": 2}
    model = fresh_model({"model_type": "llama", "num_attention_heads": 3, **sizes}, head=head, seed=5, dtype=dtype)
    source = generator(5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        back = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / (math.sqrt(2 * 2) if back else 1.0)
        if name == "head.weight" and head == "scalar":
            std, source = 1 / math.sqrt(7), generator(5)
        expected = torch.empty(parameter.shape, dtype=dtype).normal_(0.0, std, generator=source)
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("shards", "tied"), [(5e9, True), (20_000, False)])
def test_each_rank_reads_its_boxes(
    model_type: str, shards: float, tied: bool, mesh: Mesh, tiny: Tiny, tmp_path: Path
) -> None:
    model = fresh_model(tiny(model_type, vocab_size=96, tie_word_embeddings=tied), seed=3)
    assert isinstance(model, Decoder)
    save_model(model, tmp_path, max_shard_bytes=shards)
    files = weight_files(tmp_path)
    assert (len(files) > 1) == (shards < 1e9)
    for rank in range(mesh.world):
        mine = empty(Layout(model.config, "lm", mesh), rank)
        read_weights(mine, files=files, dtype=torch.float32, seed=0)
        assert_part_of(mine, parameters(model))


def test_a_rank_reads_no_other_bytes(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows in a file only the rank's own: nothing beside the boxes that the layout names."""
    model = fresh_model(tiny("llama", vocab_size=96), seed=3)
    assert isinstance(model, Decoder)
    save_model(model, tmp_path)
    layout, read = Layout(model.config, "lm", Mesh(data=4)), list[int]()
    preadv = boxes.os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        read.append(count := preadv(file, buffers, offset))
        assert count <= 600
        return count

    monkeypatch.setattr(boxes.os, "preadv", counted)
    read_weights(mine := empty(layout, 1), files=weight_files(tmp_path), dtype=torch.float32, seed=0)
    assert sum(read) == 4 * sum(tensor.numel() for tensor in mine.tensors.values())


def test_weights_are_rounded_once(tiny: Tiny, tmp_path: Path) -> None:
    """Shards are float32 while passes compute in bfloat16: they begin as the whole model does."""
    save_model(fresh_model(tiny("llama"), seed=3), tmp_path)
    whole = load_model(str(tmp_path), dtype=torch.bfloat16)
    assert isinstance(whole, Decoder)
    mine = empty(Layout(whole.config, "lm", Mesh(data=2)), 1)
    read_weights(mine, files=weight_files(tmp_path), dtype=torch.bfloat16, seed=0)
    assert_part_of(mine, {name: tensor.float() for name, tensor in parameters(whole).items()})


def test_a_fresh_head_on_a_policy_is_the_same_in_any_mesh(tiny: Tiny, tmp_path: Path) -> None:
    save_model(fresh_model(tiny("llama"), seed=3), tmp_path)
    whole = load_model(str(tmp_path), head="scalar", seed=8)
    assert isinstance(whole, Decoder)
    for rank in (0, 1):
        mine = empty(Layout(whole.config, "scalar", Mesh(data=2)), rank)
        read_weights(mine, files=weight_files(tmp_path), dtype=torch.float32, seed=8)
        assert_part_of(mine, parameters(whole))


def test_a_head_that_differs_from_its_tied_embedding_is_found_by_the_rank_that_holds_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = fresh_model(tiny("gpt2", vocab_size=40), seed=3)
    assert isinstance(model, Decoder)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    tensors["lm_head.weight"][39, 1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    layout = Layout(model.config, "lm", Mesh(data=2))
    read_weights(empty(layout, 0), files=weight_files(tmp_path), dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true.* lm_head\.weight"):
        read_weights(empty(layout, 1), files=weight_files(tmp_path), dtype=torch.float32, seed=0)


def pieces_of(path: Path, name: str, box: Any) -> Iterator[Tensor]:
    return (piece for _, piece in read_box(stored_in([path])[name], box))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_boxes_of_any_kind_of_number_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.arange(50 * 7) % 251).view(50, 7).to(dtype)
    read = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3), "b": values, "c": values[:, 1].clone(), "d": values[0, 0].clone()}, read)
    assert torch.equal(torch.cat(list(pieces_of(read, "b", ((4, 47), (2, 5))))), values[4:47, 2:5])
    assert torch.equal(torch.cat(list(pieces_of(read, "c", ((4, 47),)))), values[4:47, 1])
    assert torch.equal(torch.cat(list(pieces_of(read, "d", ()))).view(()), values[0, 0])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_are_merged_in_boxes(model_type: str, mesh: Mesh, tiny: Tiny) -> None:
    model = add_lora(fresh_model(tiny(model_type, vocab_size=96), seed=3), LoraSettings(rank=3), seed=1)
    adapters = {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
    for name, tensor in adapters.items():
        if ".lora_b." in name:
            tensor.normal_(generator=generator(len(name)))
    own = parameters(model)
    shares = []
    for rank in range(mesh.world):
        mine = empty(Layout(model.config, "lm", mesh, model.lora), rank)
        for one, target in mine.slices():
            target.copy_(box_of(one, own[one.ours]))
        shares.append(mine)
    merge_lora(model)
    whole = parameters(model)
    assert not torch.equal(whole["layers.0.attention.qkv.weight"], own["layers.0.attention.qkv.weight"])
    for mine in shares:
        for one, held in mine.slices():
            box = box_of(one, whole[one.ours])
            torch.testing.assert_close(merged(mine.layout, one, held, adapters), box, rtol=1e-6, atol=1e-6)


def test_adapters_wait_for_room_as_weights_do(tiny: Tiny, tmp_path: Path) -> None:
    """A deferred model with adapters from a checkpoint, filled as half of a rank's pair."""
    settings = LoraSettings(rank=3)
    trained = add_lora(fresh_model(tiny("llama"), seed=3), settings, seed=1)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_b." in name:
                parameter.normal_()
    save_model(trained, tmp_path)
    save_lora(trained, tmp_path / "adapter")
    deferred = fresh_model(tiny("llama"), seed=3, deferred=True)
    assert {parameter.device.type for parameter in deferred.parameters()} == {"meta"}
    deferred = restore_lora(add_lora(deferred, settings), tmp_path)
    assert deferred.pending is not None
    shapes = {name: tuple(parameter.shape) for name, parameter in deferred.named_parameters()}
    mine = Share(
        Layout(deferred.config, "lm", Mesh(data=2), deferred.lora),
        1,
        {name: torch.full((rows - -(-rows // 2), *others), math.nan) for name, (rows, *others) in shapes.items()},
        torch.float32,
    )
    for fill in deferred.pending:
        fill(mine)
    for name, parameter in trained.named_parameters():
        assert torch.equal(mine.tensors[name], torch.chunk(parameter.detach(), 2)[1]), name
    other = add_lora(fresh_model(tiny("llama"), seed=4, deferred=True), settings)
    load_lora(other, tmp_path / "adapter")
    other = restore_lora(other, tmp_path)
    assert other.pending is not None
    *values, check = other.pending
    for fill in values:
        fill(mine)
    with pytest.raises(ValueError, match="another model"):
        check(mine)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("most", "dtype"), [(5e9, torch.bfloat16), (20_000, torch.float32)])
def test_ranks_write_the_files_that_safetensors_writes_of_the_whole(
    model_type: str, most: float, dtype: torch.dtype, mesh: Mesh, tiny: Tiny, tmp_path: Path
) -> None:
    """Byte for byte, whatever the mesh; float32 shards of a bfloat16 model are rounded."""
    model = fresh_model(tiny(model_type, vocab_size=96), seed=3, dtype=dtype)
    assert isinstance(model, Decoder)
    layout, own = Layout(model.config, "lm", mesh), parameters(model)
    for rank in range(mesh.world):
        mine = replace(empty(layout, rank), dtype=dtype)
        for one, target in mine.slices():
            target.copy_(box_of(one, own[one.ours]))
        if rank == 0:
            begin_weights(mine, tmp_path, most=most)
        write_weights(mine, tmp_path, most=most)
    files = weight_files(tmp_path)
    assert (len(files) > 1) == (most < 1e9)
    stored = {name: tensor.contiguous() for name, tensor in model.hf_tensors()}
    for path in files:
        names = load_file(path).keys()
        save_file({name: stored[name].clone() for name in names}, tmp_path / "whole", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "whole").read_bytes(), path
    save_model(model, tmp_path / "one", max_shard_bytes=most)
    assert [path.read_bytes() for path in weight_files(tmp_path / "one")] == [path.read_bytes() for path in files]


def test_no_more_than_a_bucket_is_copied_at_once(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model(tiny("llama", vocab_size=96), seed=3)
    pwrite, sizes = boxes.os.pwrite, list[int]()

    def counted(file: int, view: Any, offset: int) -> int:
        sizes.append(len(view))
        return int(pwrite(file, view, offset))

    monkeypatch.setattr(boxes.os, "pwrite", counted)
    save_model(model, tmp_path)
    assert max(sizes) <= 600
    assert sum(sizes) == 4 * sum(parameter.numel() for parameter in model.parameters())
