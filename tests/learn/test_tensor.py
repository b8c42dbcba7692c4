"""Ranks that share each matrix, or each pass, learn what one learns, and go on from each other's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_at_work import Compared, Job, figures, furthest

from plaudit.compute.axis import Axis
from plaudit.models.load import fresh_model
from plaudit.models.mesh import MeshError

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 420,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 420}
LLAMA = {"model_type": "llama", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
MISTRAL = {"model_type": "mistral", **SIZES, "sliding_window": 6}
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
    "window": ("dpo", MISTRAL, {}),
    "half": ("sft", LLAMA | TIED, {"learn": {"precision": "bfloat16"}}),
}
"""Method, model and sections."""
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"mesh": {"tensor": 2}}),
    "tensor 4": (4, {"mesh": {"tensor": 4}}),
    "2 x 2": (4, {"mesh": {"tensor": 2, "data": 2}}),
    "fsdp 2 x 2": (4, {"mesh": {"tensor": 2}, "num_training_workers": 2, "strategy": "fsdp"}),
    "context 2": (2, {"mesh": {"context": 2}}),
    "fsdp context 2": (2, {"mesh": {"context": 2}, "strategy": "fsdp"}),
    "context 2 x data 2": (4, {"mesh": {"context": 2, "data": 2}}),
    "context 2 x tensor 2": (4, {"mesh": {"context": 2, "tensor": 2}}),
    "fsdp context 2 x data 2": (4, {"mesh": {"context": 2, "data": 2}, "strategy": "fsdp"}),
}
LEARNED = [
    *((case, "tensor 2") for case in CASES),
    *((case, "2 x 2") for case in ("grpo", "ppo", "lora")),
    *((case, "fsdp 2 x 2") for case in ("grpo", "lora", "half")),
    *((case, "tensor 4") for case in ("sft", "ppo")),
    *((case, "context 2") for case in CASES),
    *((case, "context 2 x tensor 2") for case in ("sft", "reward", "grpo", "ppo", "lora judge")),
    *((case, "context 2 x data 2") for case in ("grpo", "lora")),
    *((case, "fsdp context 2") for case in ("ppo", "half")),
    *((case, "fsdp context 2 x data 2") for case in ("grpo", "lora")),
]
GRADIENTS = [
    *((case, "tensor 2") for case in CASES if case != "half"),
    *((case, "2 x 2") for case in ("grpo", "ppo", "dpo")),
    ("grpo", "fsdp 2 x 2"),
    *((case, "context 2") for case in CASES if case != "half"),
    *((case, "context 2 x tensor 2") for case in ("sft", "reward", "grpo", "ppo")),
    *(("grpo", how) for how in ("context 2 x data 2", "fsdp context 2 x data 2")),
]
ON_ONE = [
    *((case, "tensor 2") for case in ("grpo", "ppo", "lora")),
    *(("grpo", how) for how in ("fsdp 2 x 2", "context 2 x tensor 2", "fsdp context 2 x data 2")),
    ("lora", "2 x 2"),
]
AGAIN = [("grpo", "tensor 2"), ("lora", "tensor 2"), ("half", "tensor 2"), ("ppo", "2 x 2"), ("grpo", "context 2")]
"""Cases that are resumed on the mesh of before."""
MOVED = [
    ("grpo", "tensor 2", "fsdp context 2 x data 2"),
    ("lora", "context 2", "2 x 2"),
    ("ppo", "fsdp context 2", "context 2 x tensor 2"),
]
"""Cases that are resumed on another mesh."""
FROM_ONE = [("grpo", "tensor 2"), ("lora judge", "tensor 2"), ("ppo", "2 x 2"), ("ppo", "context 2 x tensor 2")]


@pytest.fixture(scope="module")
def done(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Folders of finished jobs, <case>/<mesh>: from the start, of one step, and resumed."""
    root = tmp_path_factory.mktemp("tensor")

    def job(case: str, how: str, mesh: str | None = None, **more: Any) -> Job:
        method, model, given = CASES[case]
        sections = {**given, "learn": {"micro_tokens": 40} | given.get("learn", {})}
        sections["optimizer"] = {"eps": 1e-3, "schedule": "constant"}
        if mesh is not None:
            sections["runtime"] = {"kind": "ray", **MESHES[mesh][1]}
        recipe = make_recipe(method, root / "unused", **sections)
        recipe["model"]["config"] = model
        folder = str(root / case / how)
        common = 4 if case == "window" else 0
        return {"recipe": recipe, "folder": folder, "steps": (0, 3), "out": folder, "common": common, **more}

    worlds = {how: ranks for how, (ranks, _) in MESHES.items()}
    return Compared(worlds, LEARNED, GRADIENTS, AGAIN, FROM_ONE, ON_ONE, MOVED).done(job, root, environment)


def tolerance(case: str) -> float:
    return 4e-3 if case == "half" else 1e-6


@pytest.mark.parametrize(("case", "how"), LEARNED)
def test_ranks_that_share_matrices_learn_what_one_learns(case: str, how: str, done: Path) -> None:
    """Weights of every model, and every figure: the norm among them, which clipping would hide from the weights."""
    assert furthest(done / case / "alone", done / case / how) < tolerance(case)
    alone, cut = figures(done / case / "alone"), figures(done / case / how)
    ranks = MESHES[how][0] if how.startswith("fsdp") else MESHES[how][1]["mesh"].get("tensor", 1)
    assert 1 / ranks <= cut["kept"] / alone["kept"] < 1.2 / ranks, "norms and few others are copied"
    for mine, theirs in zip(alone["steps"], cut["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        mine.pop("accuracy", None)  # at first the policy is its reference: a sign of rounding
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=2e-2 if case == "half" else 1e-6), name


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
    assert figures(one)["steps"][1:] == figures(other)["steps"]


def test_key_value_heads_are_not_cut_in_two() -> None:
    with pytest.raises(MeshError, match=r"tensor=4 .* 2 key-value .*data=2 tensor=2\."):
        fresh_model(LLAMA, axis=Axis(0, 4))


def test_models_that_run_through_transformers_are_not_cut() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(MeshError, match=r"tensor=2 .*runtime\.strategy=fsdp"):
        fresh_model(neox, vocab_size=10, axis=Axis(0, 2))
