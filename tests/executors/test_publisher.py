"""What the ranks of a mesh give rollout workers, in real processes: together the model of one rank, equally divided."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_at_work import Job, at_work, do
from safetensors import safe_open
from safetensors.torch import load_file

from plaudit.compute.digest import digest
from plaudit.weights.changes import completed
from plaudit.weights.packed import PackedWeights, unpack

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 420}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "hidden_size": 40, "intermediate_size": 50, "vocab_size": 420, **SIZES}
NEOX = {"model_type": "gpt_neox", "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16}
HALF = {"learn": {"precision": "bfloat16"}, "optimizer": {"learning_rate": 1e-6, "warmup": 0}}
LORA = {"model": {"lora": {"rank": 3, "alpha": 6.0}}}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT2, {}),
    "llama": (LLAMA, {}),
    "half": (LLAMA, HALF),
    "lora": (LLAMA, LORA),
    "neox": (NEOX, {}),
}
TENSOR, SHARDS, WHOLE = {"mesh": {"tensor": 2}}, {"strategy": "fsdp"}, {"strategy": "replicate"}
STAGES = {"mesh": {"pipeline": 2}}
CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "gpt2", "tensor", TENSOR),
    (2, "gpt2", "shards", SHARDS),
    (2, "llama", "copies", WHOLE),
    (2, "half", "tensor", TENSOR),
    (2, "half", "shards", SHARDS),
    (2, "lora", "tensor", TENSOR),
    (2, "lora", "stages", STAGES),
    (2, "gpt2", "stages", STAGES),
    (2, "lora", "shards", SHARDS),
    (2, "neox", "shards", SHARDS),
    (4, "llama", "shards of parts", {**TENSOR, **SHARDS, "num_training_workers": 2}),
    (4, "half", "copies of parts", {**TENSOR, "num_training_workers": 2}),
    (4, "llama", "parts of stages", {"mesh": {"pipeline": 2, "tensor": 2}}),
]
GIVEN = [(model, how) for _, model, how, _ in CASES]
APART = ("lora", "neox")
DIVIDED = [(model, how, world) for world, model, how, _ in CASES if model not in APART and "stages" not in how]


@pytest.fixture(scope="module")
def done(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Folders of ranks that made a step and gave their weights, <model>/<how>."""
    root = tmp_path_factory.mktemp("given")

    def job(model: str, how: str, runtime: dict[str, Any]) -> Job:
        config, sections = MODELS[model]
        recipe = make_recipe("sft", root / "unused", **sections, runtime=runtime)
        recipe["model"]["config"] = config
        folder = str(root / model / how)
        return {"recipe": recipe, "folder": folder, "steps": (0, 1), "out": folder, "publish": True}

    for model in MODELS:
        do(job(model, "alone", {}), 0, 1, "")
    for world in (2, 4):
        jobs = [job(model, how, {"kind": "ray", **runtime}) for size, model, how, runtime in CASES if size == world]
        at_work(jobs, world, root / str(world), environment)
    return root


def given(folder: Path) -> dict[Path, PackedWeights]:
    return {file: pickle.loads(file.read_bytes()) for file in sorted(folder.glob("packed*.pickle"))}


def packed_of(folder: Path) -> list[PackedWeights]:
    return list(given(folder).values())


@pytest.mark.parametrize(("model", "how"), GIVEN)
def test_what_ranks_give_is_their_model_with_its_digest(model: str, how: str, done: Path) -> None:
    """The digest of stored tensors, which each rank has only some boxes of, is that of the whole ones."""
    packed_parts = packed_of(done / model / how)
    assert {packed.version for packed in packed_parts} == {1}
    weights = unpack(*packed_parts)
    assert digest(weights) == packed_parts[0].digest
    alone = packed_of(done / model / "alone")
    assert {name: (one.shape, one.dtype) for name, one in weights.items()} == {
        name: (one.shape, one.dtype) for name, one in unpack(*alone).items()
    }
    assert packed_parts[0].beneath == alone[0].beneath
    if model != "lora":
        whole = load_file(done / model / how / "policy.safetensors")
        assert all(torch.equal(weights[name], whole[name]) for name in whole)
        assert digest(whole) == packed_parts[0].digest


@pytest.mark.parametrize(("model", "how", "world"), DIVIDED)
def test_no_rank_gives_more_than_its_share(model: str, how: str, world: int, done: Path) -> None:
    """And packs no more at once than a part."""
    sizes: Counter[str] = Counter()
    for file, packed in given(done / model / how).items():
        sizes[file.name.split(".")[0]] += sum(entry.size for entry in packed.entries)
        assert packed.bytes <= 20_000 + 64 * len(packed.entries)
    assert len(sizes) == world
    assert max(sizes.values()) <= 1.05 * sum(sizes.values()) / world


@pytest.mark.parametrize(("model", "how", "world"), DIVIDED)
def test_ranks_that_sample_get_what_they_lack(model: str, how: str, world: int, done: Path) -> None:
    """Every one has the whole model, and nothing travels that is there already."""
    whole = load_file(done / model / how / "policy.safetensors")
    size = sum(tensor.nbytes for tensor in whole.values())
    for rank in range(world):
        file = done / model / how / f"inside{rank}.safetensors"
        assert digest(load_file(file)) == digest(whole)
        with safe_open(file, "pt") as found:
            got, shared = (int(found.metadata()[key]) for key in ("bytes", "shared"))
        held = {"copies": 1.0, "shards of parts": 0.25}.get(how, 0.5)
        assert got == pytest.approx((1 - held) * size, rel=0.1)
        assert (shared > 0) == ("shards" not in how)


@pytest.mark.parametrize("how", ["tensor", "shards"])
def test_ranks_that_sample_get_all_adapters(how: str, done: Path) -> None:
    """On a base model of their own, to the bit."""
    whole = load_file(done / "lora" / how / "policy.safetensors")
    for rank in range(2):
        assert digest(load_file(done / "lora" / how / f"inside{rank}.safetensors")) == digest(whole)


@pytest.mark.parametrize(("model", "how"), GIVEN)
def test_only_bfloat16_is_sent_as_changes_and_a_small_step_in_a_twentieth_of_the_bytes(
    model: str, how: str, done: Path
) -> None:
    folder = done / model / how
    before, sent, whole = (packed_of(one) for one in (folder / "before", folder / "sent", folder))
    assert [packed.base for packed in sent] == [packed.name if model == "half" else "" for packed in before]
    found = completed(before, sent)
    assert [packed.name for packed in found] == [packed.name for packed in whole]
    assert digest(unpack(*found)) == found[0].digest != before[0].digest
    if model == "half":
        assert 0 < sum(packed.bytes for packed in sent) <= 0.05 * sum(packed.bytes for packed in whole)


@pytest.mark.parametrize(("model", "how"), [(model, how) for model, how in GIVEN if model in APART])
def test_adapters_and_models_without_boxes_come_from_the_first_rank(model: str, how: str, done: Path) -> None:
    packed_parts = given(done / model / how)
    assert all(file.name.startswith("packed0.") for file in packed_parts)
    assert all(bool(packed.beneath) == (model == "lora") for packed in packed_parts.values())
