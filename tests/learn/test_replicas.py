"""Replicas of shards learn what one rank learns, and go on from each other's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_at_work import Job, at_work, do, figures, furthest, of_gradient

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
SAVED = "epoch1epochstep1globalstep1"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 421,  # rows that two ranks do not share equally
}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"reference": {"ema": 0.1}, "algorithm": {"kl_in_loss": 0.1}},
    "ppo": {"critic": {"learning_rate": 0.003}, "algorithm": {"minibatches": 2}},
    "lora": {"model": {"lora": {"rank": 3, "alpha": 6.0}}, "algorithm": {"kl_in_loss": 0.1}},
}
METHOD = {"lora": "grpo"}
MESHES: dict[str, dict[str, Any]] = {
    "2 x 2": {"mesh": {"replicas": 2, "data": 2}, "strategy": "fsdp"},
    "2 x 2, zero1": {"mesh": {"replicas": 2, "data": 2}, "strategy": "zero1"},
    "four": {"num_training_workers": 4, "strategy": "zero2"},
}
LEARNED = [("grpo", "2 x 2"), ("ppo", "2 x 2, zero1"), ("lora", "2 x 2")]
GRADIENTS = [("ppo", "2 x 2"), ("grpo", "2 x 2, zero1")]
AGAIN = [("grpo", "2 x 2"), ("ppo", "2 x 2, zero1")]
"""Cases that are resumed on the mesh of before."""
ELSEWHERE = [("grpo", "2 x 2", "four"), ("lora", "2 x 2", "alone"), ("ppo", "alone", "2 x 2")]
"""A case, the mesh of its checkpoint, and another one."""


@pytest.fixture(scope="module")
def done(make_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Folders of finished jobs, <case>/<mesh>: from the start, of one step, and resumed."""
    root = tmp_path_factory.mktemp("replicas")

    def job(case: str, how: str, mesh: str = "alone", **more: Any) -> Job:
        sections = {**CASES[case], "learn": {"micro_tokens": 40}, "optimizer": {"eps": 1e-3, "schedule": "constant"}}
        if mesh in MESHES:
            sections["runtime"] = {"kind": "ray", **MESHES[mesh]}
        recipe = make_recipe(METHOD.get(case, case), root / "unused", **sections)
        recipe["model"]["config"] = LLAMA
        folder = str(root / case / how)
        return {"recipe": recipe, "folder": folder, "steps": (0, 3), "out": folder, **more}

    def resumed(case: str, how: str, mesh: str) -> Job:
        made = job(case, f"{how} on {mesh}", mesh, steps=(1, 3), resume=SAVED)
        return made | {"folder": str(root / case / how)}

    for case in CASES:
        do(job(case, "alone", save=1), 0, 1, "")
    for case, _ in GRADIENTS:
        do(of_gradient(job(case, "gradient alone", steps=(0, 1))), 0, 1, "")
    jobs = [job(case, how, how, save=1) for case, how in LEARNED]
    jobs += [of_gradient(job(case, f"gradient {how}", how, steps=(0, 1))) for case, how in GRADIENTS]
    jobs += [resumed(case, how, how) for case, how in AGAIN]
    jobs += [resumed(case, how, other) for case, how, other in ELSEWHERE if other in MESHES]
    at_work(jobs, 4, root / "four", environment)
    for case, how, other in ELSEWHERE:
        if other == "alone":
            do(resumed(case, how, other), 0, 1, "")
    return root


@pytest.mark.parametrize(("case", "how"), LEARNED)
def test_replicas_of_shards_learn_what_one_rank_learns(case: str, how: str, done: Path) -> None:
    """Weights of every model, and every figure: the norm among them, in which a replica must not count twice."""
    assert furthest(done / case / "alone", done / case / how) < 1e-6
    alone, mesh = figures(done / case / "alone"), figures(done / case / how)
    for mine, theirs in zip(alone["steps"], mesh["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert 0.5 <= mesh["kept"] / alone["kept"] < 0.51


@pytest.mark.parametrize(("case", "how"), GRADIENTS)
def test_they_have_the_gradient_of_one(case: str, how: str, done: Path) -> None:
    """No moments between the gradient and the weights, and no clipping."""
    alone, mesh = done / case / "gradient alone", done / case / f"gradient {how}"
    assert furthest(alone, mesh) < 1e-6
    assert furthest(alone, done / case / "alone") > 1e-3, "there is a gradient"


@pytest.mark.parametrize(("case", "how"), LEARNED)
def test_their_checkpoint_is_written_once(case: str, how: str, done: Path) -> None:
    """Whole, by the ranks of the first replica: what a rank of one would write after the same step."""
    one, other = (sorted((done / case / mesh).rglob("*.safetensors")) for mesh in ("alone", how))
    names = [[path.relative_to(done / case / mesh) for path in paths] for mesh, paths in (("alone", one), (how, other))]
    assert names[0] == names[1] and len(names[0]) > 2
    assert [path.stat().st_size for path in one] == [path.stat().st_size for path in other]


@pytest.mark.parametrize(("case", "how"), AGAIN)
def test_they_go_on_bit_for_bit_on_the_same_mesh(case: str, how: str, done: Path) -> None:
    one, other = done / case / how, done / case / f"{how} on {how}"
    assert furthest(one, other) == 0.0
    assert figures(one)["steps"][1:] == figures(other)["steps"]


@pytest.mark.parametrize(("case", "how", "other"), ELSEWHERE)
def test_a_checkpoint_goes_on_on_another_mesh(case: str, how: str, other: str, done: Path) -> None:
    assert furthest(done / case / how, done / case / f"{how} on {other}") < 1e-6
