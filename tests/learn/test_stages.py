"""Stages of a pipeline learn what one rank learns, and go on from each other's checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_at_work import Compared, Job, figures, furthest

from plaudit.models.config import HeadKind
from plaudit.models.families import read_config
from plaudit.models.layout import Layout
from plaudit.models.load import fresh_model
from plaudit.models.mesh import Mesh, MeshError, Stage
from plaudit.models.settings import LoraSettings

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 420,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 420}
LLAMA = {"model_type": "llama", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 16}
TIED, UNTIED = ({"tie_word_embeddings": tied} for tied in (True, False))
LORA = {"lora": {"rank": 3, "alpha": 6.0}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", GPT2, {"learn": {"activation_checkpointing": True}}),
    "dpo": ("dpo", LLAMA, {}),
    "reward": ("reward", QWEN3, {}),
    "grpo": ("grpo", QWEN3 | TIED, {"reference": {"ema": 0.1}, "algorithm": {"kl_in_loss": 0.1, "entropy_bonus": 0.1}}),
    "ppo": ("ppo", GPT2 | UNTIED, {"critic": {"learning_rate": 0.003}, "algorithm": {"minibatches": 2}}),
    "lora": ("grpo", LLAMA, {"model": LORA, "algorithm": {"kl_in_loss": 0.1}}),
    "lora judge": ("reward", GPT2, {"model": LORA}),
    "half": ("sft", LLAMA | TIED, {"learn": {"precision": "bfloat16"}}),
}
"""Method, model and sections."""
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "pipeline 2": (2, {"pipeline": 2}),
    "spans 2": (2, {"pipeline": 2, "spans": 2}),
    "data 2": (4, {"pipeline": 2, "data": 2}),
    "tensor 2": (4, {"pipeline": 2, "tensor": 2}),
    "context 2": (4, {"pipeline": 2, "context": 2}),
    "pipeline 4": (4, {"pipeline": 4}),
    "shards": (4, {"pipeline": 2, "data": 2}),
    "spans and shards": (4, {"pipeline": 2, "spans": 2, "data": 2}),
    "gradients in shards": (4, {"pipeline": 2, "data": 2}),
    "copies of shards": (8, {"pipeline": 2, "data": 2, "replicas": 2}),
}
STRATEGIES = {"shards": "fsdp", "spans and shards": "fsdp", "gradients in shards": "zero2", "copies of shards": "fsdp"}
LEARNED = [
    *((case, "pipeline 2") for case in CASES),
    *((case, "spans 2") for case in ("sft", "ppo", "lora")),
    *((case, "data 2") for case in ("grpo", "ppo", "lora", "half")),
    *((case, "tensor 2") for case in ("grpo", "ppo", "lora", "half")),
    *((case, "context 2") for case in ("grpo", "ppo")),
    *((case, "pipeline 4") for case in ("sft", "ppo")),
    *((case, "shards") for case in CASES),
    ("grpo", "spans and shards"),
    ("ppo", "gradients in shards"),
    ("grpo", "copies of shards"),
]
GRADIENTS = [
    *((case, "pipeline 2") for case in CASES if case != "half"),
    *((case, "spans 2") for case in ("grpo", "reward")),
    *((case, how) for case in ("grpo", "ppo", "dpo") for how in ("data 2", "tensor 2", "context 2")),
    ("sft", "pipeline 4"),
    *((case, "shards") for case in ("grpo", "ppo", "lora")),
    ("grpo", "spans and shards"),
    ("ppo", "gradients in shards"),
]
ON_ONE = [("grpo", "pipeline 2"), ("ppo", "spans 2"), ("lora", "pipeline 2"), ("lora", "tensor 2"), ("ppo", "shards")]
AGAIN = [("grpo", "pipeline 2"), ("half", "shards"), ("lora", "tensor 2"), ("ppo", "data 2")]
"""Cases that are resumed on the mesh of before."""
MOVED = [("ppo", "spans 2", "tensor 2"), ("lora", "shards", "data 2"), ("grpo", "tensor 2", "shards")]
"""Cases that are resumed on another mesh."""
FROM_ONE = [("grpo", "pipeline 2"), ("lora judge", "pipeline 2"), ("sft", "spans 2"), ("ppo", "shards")]


@pytest.fixture(scope="module")
def done(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Folders of finished jobs, <case>/<mesh>: from the start, of one step, and resumed."""
    root = tmp_path_factory.mktemp("stages")

    def job(case: str, how: str, mesh: str | None = None, **more: Any) -> Job:
        method, model, given = CASES[case]
        sections = {**given, "learn": {"micro_tokens": 40} | given.get("learn", {})}
        sections["optimizer"] = {"eps": 1e-3, "schedule": "constant"}
        if mesh is not None:
            strategy = STRATEGIES.get(mesh, "replicate")
            sections["runtime"] = {"kind": "ray", "mesh": MESHES[mesh][1], "strategy": strategy}
        recipe = make_recipe(method, root / "unused", **sections)
        recipe["model"]["config"] = model
        folder = str(root / case / how)
        return {"recipe": recipe, "folder": folder, "steps": (0, 3), "out": folder, **more}

    worlds = {how: ranks for how, (ranks, _) in MESHES.items()}
    return Compared(worlds, LEARNED, GRADIENTS, AGAIN, FROM_ONE, ON_ONE, MOVED).done(job, root, environment)


def tolerance(case: str) -> float:
    return 4e-3 if case == "half" else 1e-6


def without_times(stats: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if not name.startswith("bubble/")}


@pytest.mark.parametrize(("case", "how"), LEARNED)
def test_stages_learn_what_one_rank_learns(case: str, how: str, done: Path) -> None:
    """Weights of every model, and every figure: the norm among them, which clipping would hide from the weights."""
    assert furthest(done / case / "alone", done / case / how) < tolerance(case)
    alone, cut = figures(done / case / "alone"), figures(done / case / how)
    for mine, theirs in zip(alone["steps"], cut["steps"], strict=True):
        bubbles = {name: value for name, value in theirs.items() if name not in without_times(theirs)}
        assert bubbles.keys() == {name.replace("loss", "bubble") for name in mine if name.startswith("loss/")} or (
            mine is alone["steps"][-1] and not bubbles
        ), "those of evaluation have none"
        assert all(0.0 < value < 1.0 for value in bubbles.values())
        assert mine.keys() == without_times(theirs).keys()
        mine.pop("accuracy", None)  # at first the policy is its reference: a sign of rounding
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=2e-2 if case == "half" else 1e-6), name


HELD: dict[str, tuple[HeadKind, ...]] = {
    **dict.fromkeys(("sft", "half"), ("lm",)),
    **dict.fromkeys(("dpo", "grpo", "lora"), ("lm", "lm")),
    **dict.fromkeys(("reward", "lora judge"), ("scalar",)),
    "ppo": ("lm", "scalar", "lm"),
}
"""Heads of the models of a case, with the reference, which is the policy under LoRA."""


@pytest.mark.parametrize(("case", "how"), LEARNED)
def test_a_rank_keeps_its_own_layers_only(case: str, how: str, done: Path) -> None:
    """As much as the slice table says: the first stage has the embeddings, the last one norm and head."""
    _, model, sections = CASES[case]
    lora = LoraSettings(**sections["model"]["lora"]) if "model" in sections else None
    axes = dict(MESHES[how][1])
    if how not in STRATEGIES:
        axes["replicas"] = axes.pop("data", 1) * axes.pop("context", 1)
    mesh = Mesh(**axes)
    layouts = [Layout(read_config(model), head, mesh, lora) for head in HELD[case]]
    kept = []
    for place in map(mesh.place, range(mesh.world)):
        held = [
            one.shape(name, place)
            for one in layouts
            for name in (*one.parameters, *one.adapters)
            if place.stage in one.stages(name)
        ]
        kept.append(sum(map(math.prod, held)))
    assert figures(done / case / how)["of ranks"] == kept


@pytest.mark.parametrize(("case", "how"), GRADIENTS)
def test_they_have_the_gradient_of_one(case: str, how: str, done: Path) -> None:
    """No moments between the gradient and the weights, and no clipping."""
    alone, cut = done / case / "gradient alone", done / case / f"gradient {how}"
    assert furthest(alone, cut) < 1e-6
    assert furthest(alone, done / case / "alone") > 1e-3, "there is a gradient"


@pytest.mark.parametrize(("case", "how"), ON_ONE)
def test_one_rank_goes_on_from_their_checkpoint(case: str, how: str, done: Path) -> None:
    """Optimizer included: its moments are steps of the size that is compared."""
    assert furthest(done / case / how, done / case / f"{how} on one") < tolerance(case)


@pytest.mark.parametrize(("case", "how"), FROM_ONE)
def test_they_go_on_from_the_checkpoint_of_one(case: str, how: str, done: Path) -> None:
    assert furthest(done / case / "alone", done / case / f"alone on {how}") < tolerance(case)


@pytest.mark.parametrize(("case", "how", "to"), MOVED)
def test_another_mesh_goes_on_from_their_checkpoint(case: str, how: str, to: str, done: Path) -> None:
    assert furthest(done / case / how, done / case / f"{how} on {to}") < tolerance(case)


@pytest.mark.parametrize(("case", "how"), AGAIN)
def test_they_go_on_bit_for_bit_on_the_same_mesh(case: str, how: str, done: Path) -> None:
    one, other = done / case / how, done / case / f"{how} on the same"
    assert furthest(one, other) == 0.0
    steps = ([without_times(stats) for stats in figures(folder)["steps"]] for folder in (one, other))
    assert next(steps)[1:] == next(steps)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(MeshError, match=r"pipeline=3 .*4 layers.* Take "):
        fresh_model(LLAMA, stage=Stage(0, Mesh(pipeline=3)))
    with pytest.raises(MeshError, match=r"pipeline=2 times spans=3 .*4 layers.* Take pipeline=2\."):
        fresh_model(LLAMA, stage=Stage(0, Mesh(pipeline=2, spans=3)))


def test_models_that_run_through_transformers_have_no_stages() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(MeshError, match=r"pipeline=2 .*runtime\.strategy=fsdp"):
        fresh_model(neox, vocab_size=10, stage=Stage(0, Mesh(pipeline=2)))
