"""The arithmetic of `plaudit layout`, beside real ranks' tensors and numbers worked by hand."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from plaudit.commands.cli import main
from plaudit.models.families import read_config
from plaudit.models.layout import Layout
from plaudit.models.mesh import Mesh, MeshError
from plaudit.models.moves import Moves
from plaudit.models.settings import LoraSettings
from plaudit.preflight.held import models_of
from plaudit.preflight.layout import Model, amounts, extremes, publish, read_mesh
from plaudit.settings.recipes import read_settings
from plaudit.types import Role

Recipe = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LAYER = 4 * 4 * 4 + 3 * 4 * 6 + 2 * 4  # four projections of attention, three of the MLP, two norms: 144
WHOLE = 2 * LAYER + 2 * 10 * 4 + 4


def model(mesh: Mesh, *, low: int = 4, trained: bool = True, lora: LoraSettings | None = None) -> Model:
    return Model(Role.POLICY, Layout(read_config(LLAMA), "lm", mesh, lora), trained=trained, bytes=low)


def bytes_a_weight(one: Model) -> tuple[float, ...]:
    """Weights, gradients, moments and masters of rank 0, a weight of the whole model."""
    return tuple(size / WHOLE for size in one.held(one.layout.mesh.place(0)).values())


def test_a_whole_model_takes_16_bytes_a_weight_and_18_in_bfloat16() -> None:
    """As benchmarks/sharding.py measured for `replicate`."""
    one = Mesh()
    assert bytes_a_weight(model(one)) == (4, 4, 8, 0)
    half = model(one, low=2)
    assert bytes_a_weight(half) == (2, 4, 8, 4)
    assert half.gathered(0) == 0
    assert sum(model(one, low=2, trained=False).held(one.place(0)).values()) == 2 * WHOLE


def test_shards_are_float32_and_two_layers_are_gathered() -> None:
    two = Mesh(data=2)
    found = model(two, low=2)
    assert bytes_a_weight(found) == (2, 2, 4, 0)
    assert found.gathered(0) == 2 * WHOLE  # both layers of this model and the rest
    assert amounts([found, found], two.place(0))["gathered"] == 2 * WHOLE  # one model's pass after the other's


def test_data_and_context_shard_together() -> None:
    four = Mesh(data=2, context=2)
    assert bytes_a_weight(model(four)) == bytes_a_weight(model(Mesh(data=4)))
    assert model(four).gathered(0) == 4 * WHOLE


def test_adapters_alone_are_trained_under_lora() -> None:
    """Query and down: A (3, in) and B (out, 3) each. In two shards, A's three rows are two and one."""
    lora = LoraSettings(rank=3, targets=["q_proj", "down_proj"])
    adapters = 2 * (3 * (4 + 4) + 3 * (6 + 4))
    assert model(Mesh(), lora=lora).numbers(Mesh().place(0)) == (WHOLE, adapters)
    two = Mesh(data=2)
    shares = [model(two, lora=lora).numbers(two.place(rank))[1] for rank in (0, 1)]
    assert shares == [2 * (2 * (4 + 6) + 3 * (2 + 2)), 2 * (1 * (4 + 6) + 3 * (2 + 2))]
    assert sum(shares) == adapters


def test_the_fullest_rank_of_a_pipeline_has_the_head() -> None:
    """Stages have a layer each; the first has the embedding, the last the norm and the head."""
    mesh = Mesh(pipeline=2)
    most, least = extremes([model(mesh)])
    assert (most.stage, least.stage) == (1, 0)
    assert model(mesh).numbers(most)[1] == LAYER + 40 + 4
    assert model(mesh).numbers(least)[1] == LAYER + 40


def test_a_mesh_is_read() -> None:
    assert read_mesh("data=8 tensor=2") == read_mesh("tensor=2,data=8") == Mesh(data=8, tensor=2)
    with pytest.raises(MeshError, match=r"'tensr'.* tensor"):
        read_mesh("tensr=2")
    with pytest.raises(MeshError, match="data=x"):
        read_mesh("data=x")


def test_the_models_of_a_run_are_those_that_its_method_has(make_recipe: Recipe, tmp_path: Path) -> None:
    recipe = make_recipe("ppo", tmp_path, runtime={"kind": "ray", "strategy": "fsdp", "num_training_workers": 2})
    models = models_of(read_settings(recipe, []))
    assert {one.role: (one.trained, one.layout.head) for one in models} == {
        Role.POLICY: (True, "lm"),
        Role.CRITIC: (True, "scalar"),
        Role.REFERENCE: (False, "lm"),
    }
    assert models[0].layout.mesh == Mesh(data=2)
    words = ["model.lora.rank=2", "critic.lora_rank=3", "runtime.offload=[weights]"]
    adapted = models_of(read_settings(recipe, words), None, 4)
    ranks = [(one.role, one.layout.lora.rank) for one in adapted]
    assert ranks == [(Role.POLICY, 2), (Role.CRITIC, 3)]  # the reference is the policy without adapters
    assert adapted[0].layout.mesh == Mesh(data=4)


def test_the_command_prints_boxes_and_refuses_with_the_nearest_mesh(make_recipe: Recipe, tmp_path: Path) -> None:
    recipe = make_recipe("sft", tmp_path)
    recipe["model"] |= {"config": LLAMA}
    recipe["data"]["train"] = str(tmp_path / "not here")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe))
    words = ["layout", str(tmp_path / "sft.yaml")]
    done = CliRunner().invoke(main, [*words, "--mesh", "data=2 tensor=2", "--rank", "3"])
    assert done.exit_code == 0, done.output
    lines = [line.split(maxsplit=2) for line in done.output.splitlines()]
    # Of four rows of each of query, key and value, tensor rank 1 has two: six rows, of which data rank 1 has the last.
    assert ["model.layers.{0-1}.self_attn.v_proj.weight", "4x4", "[2:4, :]"] in lines
    assert ["model.layers.{0-1}.self_attn.k_proj.weight", "4x4", "[3:4, :]"] in lines
    assert not any("q_proj" in line[0] for line in lines if line)
    assert ["model.norm.weight", "4", "[2:4]  copy"] in lines
    moved = CliRunner().invoke(main, [*words, "--mesh", "data=2", "--to", "data=1"])
    # Rank 1 has half of each tensor, as every number of rows is even, and rank 0 keeps its own.
    assert f"{WHOLE * 2 / 2**30:,.3f} GiB in all" in moved.output
    assert "to data=1: 17 boxes are sent" in moved.output
    refused = CliRunner().invoke(main, [*words, "--mesh", "tensor=4"])
    assert refused.exit_code == 2
    assert "tensor=4 does not divide 2 attention heads" in refused.output
    assert "Take data=2 tensor=2." in refused.output


def test_the_command_prints_what_a_publish_takes(make_recipe: Recipe, tmp_path: Path) -> None:
    """Of an online method without adapters."""
    recipe = make_recipe("grpo", tmp_path)
    recipe["model"] |= {"config": LLAMA}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(recipe))
    words = ["layout", str(tmp_path / "grpo.yaml")]
    done = CliRunner().invoke(main, [*words, "--mesh", "data=2"])
    assert done.exit_code == 0, done.output
    # A rank has half of each fused matrix: query and half of key, the rest of key and value; gate, up. So a layer has
    # 4 boxes of attention's input, 2 of the MLP's, and 2 each of both projections back and of both norms.
    count = 2 * (4 + 2 + 2 * 2 + 2 * 2) + 3 * 2
    assert f"to publish the policy: {count} boxes are sent, {WHOLE * 4 / 2**30:,.3f} GiB in all" in done.output
    adapted = CliRunner().invoke(main, [*words, "model.lora.rank=2", "--mesh", "data=2"])
    assert "publish" not in adapted.output


def test_a_publish_of_two_tensor_ranks_is_shared() -> None:
    """Norms, which both hold, are given by halves."""
    (line,) = publish([model(Mesh(tensor=2))])
    assert "GiB from a rank" in line
    sent = Counter[int]()
    for move in Moves(Layout(read_config(LLAMA), "lm", Mesh(tensor=2)), Layout(read_config(LLAMA)), apart=True):
        sent[move.source] += math.prod(stop - start for start, stop in move.box)
    assert sent == {0: WHOLE / 2, 1: WHOLE / 2}


@pytest.mark.slow
def test_the_table_of_the_page_is_the_computed_one(environment: dict[str, str]) -> None:
    """Up to 405 billion weights on 4,096 ranks."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts/fits.py")], capture_output=True, text=True, env=environment, check=True
    )
    assert made.stdout in (ROOT / "docs/layout.md").read_text()


@pytest.mark.parametrize(
    ("name", "billions"), [("GPT-2", 0.124), ("Llama 3 8B", 8.03), ("Qwen3 32B", 32.76), ("Llama 3 70B", 70.55)]
)
def test_configurations_have_the_sizes_that_their_authors_state(name: str, billions: float) -> None:
    fits = runpy.run_path(str(ROOT / "scripts/fits.py"))
    numbers = sum(map(math.prod, fits["trained"](name, Mesh()).layout.parameters.values()))
    assert numbers / 1e9 == pytest.approx(billions, abs=0.01)
