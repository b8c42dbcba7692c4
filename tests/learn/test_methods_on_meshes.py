"""Every method has the gradient of one rank, and its norm, on every axis and on every two axes.

One step each, in one group of processes for all. Whole training on meshes, and going on from checkpoints, is in
`test_tensor.py`, `test_stages.py`, `test_sharding.py` and `test_replicas.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_at_work import Job, at_work, do, figures, furthest, of_gradient

from plaudit.algorithms import ALGORITHMS

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 420}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 420}
LLAMA = {"model_type": "llama", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 16, "tie_word_embeddings": True}
LORA = {"model": {"lora": {"rank": 3, "alpha": 6.0}}}
AGAIN = {"learn": {"activation_checkpointing": True}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft": (GPT2, AGAIN),
    "reward": (QWEN3, LORA),
    "dpo": (LLAMA, LORA | AGAIN),
    "kto": (GPT2, {}),
    "orpo": (LLAMA, AGAIN),
    "simpo": (QWEN3, {}),
    "ppo": (QWEN3, AGAIN | {"algorithm": {"epochs": 1, "minibatches": 1}}),
    "grpo": (QWEN3, {"algorithm": {"kl_in_loss": 0.1, "entropy_bonus": 0.1}}),
    "rloo": (LLAMA, {}),
    "remax": (GPT2, LORA),
    "reinforce": (QWEN3, AGAIN),
    "distill": (LLAMA, {}),
    "online-dpo": (GPT2, {"algorithm": {"loss": "ipo", "beta": 1.0, "length_average": True}}),
    "best-of-k": (LLAMA, {"algorithm": {"kl_in_loss": 0.1}}),
    "grpo as Dr.GRPO": (GPT2, {"algorithm": {"scale_rewards": False, "aggregation": 30}}),
    "grpo as DAPO": (LLAMA, LORA | {"algorithm": {"clip": [0.2, 0.28], "dual_clip": 3.0}}),
    "grpo as GSPO": (QWEN3, {"algorithm": {"ratio": "geometric", "aggregation": "sequence", "clip": [3e-4, 4e-4]}}),
    "grpo off policy": (GPT2, {"algorithm": {"recompute_old": True, "correction": "truncate", "correction_cap": 1.05}}),
}
"""Method, its model and sections. References are frozen."""
WHOLE = "distill over the whole vocabulary"
CASES_OF_DATA = CASES | {WHOLE: (QWEN3, {"algorithm": {"whole_vocabulary": True}})}
"""Beside them what only the data axis can be used with."""
AXES = ("data", "tensor", "context", "pipeline")
MESHES: dict[str, dict[str, Any]] = {
    **{axis: {"mesh": {axis: 2}} for axis in AXES},
    "shards": {"mesh": {"data": 2}, "strategy": "fsdp"},
    **{f"{one} x {other}": {"mesh": {one: 2, other: 2}} for one, other in itertools.combinations(AXES, 2)},
    "shards x pipeline": {"mesh": {"data": 2, "pipeline": 2}, "strategy": "fsdp"},
}


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest,
    make_recipe: Recipe,
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
) -> Path:
    """Folders of a step, <case>/<mesh>, of the cases that are tested."""
    root = tmp_path_factory.mktemp("methods")

    def job(case: str, how: str) -> Job:
        model, given = CASES_OF_DATA[case]
        sections = {**given, "learn": {"micro_tokens": 40} | given.get("learn", {})}
        if how in MESHES:
            sections["runtime"] = {"kind": "ray", **MESHES[how]}
        recipe = make_recipe(case.split()[0], root / "unused", **sections)
        recipe["model"]["config"] = model
        folder = str(root / case / how)
        return of_gradient({"recipe": recipe, "folder": folder, "steps": (0, 1), "out": folder})

    tested = cases(request)
    for case in {case for case, _ in tested}:
        do(job(case, "alone"), 0, 1, "")
    for world in (2, 4):
        jobs = [job(case, how) for case, how in tested if 2 ** len(MESHES[how]["mesh"]) == world]
        at_work(jobs, world, root / str(world), environment)
    return root


def cases(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Case and mesh of this module's tests that were selected."""
    mine = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return [(params["case"], params["how"]) for params in mine]


def test_every_method_is_tried() -> None:
    assert {case.split()[0] for case in CASES} == {*ALGORITHMS}


def norms(folder: Path) -> dict[str, float]:
    (step, *_) = figures(folder)["steps"]
    return {name: value for name, value in step.items() if name.startswith("gradient_norm/")}


@pytest.mark.parametrize(("case", "how"), [(WHOLE, "data"), *itertools.product(CASES, MESHES)])
def test_it_has_the_gradient_of_one_rank_and_its_norm(case: str, how: str, done: Path) -> None:
    """A weight differs from the first one by its gradient: there are no moments, and there is no clipping."""
    alone, cut = done / case / "alone", done / case / how
    mine, theirs = norms(alone), norms(cut)
    assert mine.keys() == theirs.keys() and min(mine.values()) > 0.01, "there is a gradient"
    for name, value in mine.items():
        assert theirs[name] == pytest.approx(value, rel=1e-6), name
    assert furthest(alone, cut) < 1e-6
