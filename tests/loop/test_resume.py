"""A run that was stopped and resumed ends as if nothing had happened, bit for bit, whatever the method."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.batch import Batch
from plaudit.learn.scorer import Scorer
from plaudit.loop.progress import Moment
from plaudit.models.load import load_model
from plaudit.runs.pipeline import merged
from plaudit.types import Role, Stats

pytestmark = pytest.mark.slow

STEPS = 4
REWARDS = Path(__file__).parents[1] / "tiny.py"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "dpo with the reference's columns computed once": ("dpo", {"data": {"limit": 8}}),
    "dpo behind a moving reference": ("dpo", {"reference": {"ema": 0.1}}),
    "kto": ("kto", {"data": {"limit": 8}}),
    "sft in bfloat16": ("sft", {"learn": {"precision": "bfloat16"}}),
    "ppo in bfloat16 behind a moving reference": (
        "ppo",
        {"learn": {"precision": "bfloat16"}, "reference": {"ema": 0.001}},
    ),
    "ppo": ("ppo", {}),
    "ppo with everything that remembers": (
        "ppo",
        {
            "algorithm": {"kl_target": 0.5, "normalise_values": True, "minibatches": 2, "epochs": 2},
            "reference": {"ema": 0.1},
        },
    ),
    "grpo": ("grpo", {"algorithm": {"samples": 3, "kl_in_loss": 0.1, "minibatches": 2, "epochs": 2}}),
    "grpo with dynamic sampling": (
        "grpo",
        {
            "algorithm": {"samples": 2, "dynamic_sampling": True},
            "rewards": [{"kind": "function", "function": f"{REWARDS}:often_equal"}],
        },
    ),
    "rloo": ("rloo", {"algorithm": {"samples": 2}}),
    "remax": ("remax", {}),
    "reinforce": ("reinforce", {}),
    "reinforce with a group's baseline": ("reinforce", {"algorithm": {"samples": 2, "group_baseline": True}}),
    "distill": ("distill", {"algorithm": {"samples": 2, "reward_weight": 0.5}}),
    "online-dpo": ("online-dpo", {"algorithm": {"samples": 3}}),
    "best-of-k": ("best-of-k", {"algorithm": {"samples": 3}}),
    "sft on a stream": ("sft", {"data": {"stream": 5}}),
    "ppo on a stream": ("ppo", {"data": {"stream": 4}}),
    "sft with validation": ("sft", {"data": {"validation": "20%"}, "evaluate": {"every": 1}}),
    "ppo by a judge with validation": (
        "ppo",
        {
            "data": {"validation": "30%"},
            "evaluate": {"every": 2},
            "rewards": [{"kind": "judge", "path": "JUDGE"}],
            "rollout": {"slots": 5, "prompts_per_step": 4},
            "model": {"config": {"n_embd": 128}},
        },
    ),
}


def recipe_of(case: str, make_recipe: Any, folder: Path, judge: Path, **more: Any) -> dict[str, Any]:
    method, sections = CASES[case]
    recipe: dict[str, Any] = make_recipe(method, folder, save={"every": 1, "keep": 0}, train={"steps": STEPS}, **more)
    recipe = merged(recipe, sections)
    for reward in recipe.get("rewards", []):
        if "path" in reward:
            reward["path"] = str(judge)
    return recipe


def stopped_copy(full: Run, step: int, folder: Path) -> str:
    """The folder as a crash after `step` leaves it: later checkpoints are absent, the records lead further."""
    shutil.copytree(full.folder, folder)
    names = {int(path.name.rpartition("step")[2]): path.name for path in (folder / "checkpoints/state").iterdir()}
    for later in range(step + 1, STEPS + 1):
        for path in (folder / "checkpoints").glob(f"*/{names[later]}"):
            shutil.rmtree(path)
    return names[step]


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert_same_checkpoint(ours, theirs)
    assert timeless(ours / "metrics.jsonl") == timeless(theirs / "metrics.jsonl")
    samples = [path / "samples.jsonl" for path in (ours, theirs)]
    assert samples[0].exists() == samples[1].exists()
    if samples[0].exists():
        assert samples[0].read_text() == samples[1].read_text()


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    """The last checkpoint of both: every file equal, but for the wall-clock seconds."""
    roles = sorted(path.name for path in (ours / "checkpoints").iterdir())
    assert roles == sorted(path.name for path in (theirs / "checkpoints").iterdir())
    for role in roles:
        a, b = (
            max((f / "checkpoints" / role).iterdir(), key=lambda p: int(p.name.rpartition("step")[2]))
            for f in (ours, theirs)
        )
        assert a.name == b.name
        files = sorted(path.name for path in a.iterdir())
        assert files == sorted(path.name for path in b.iterdir())
        for file in files:
            if file.endswith(".safetensors"):
                tensors, others = load_file(a / file), load_file(b / file)
                assert tensors.keys() == others.keys()
                assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == [], (role, file)
            elif file == "values.json":
                assert without_seconds(a / file) == without_seconds(b / file)
            elif file != "manifest.json":
                assert (a / file).read_bytes() == (b / file).read_bytes(), (role, file)


def without_seconds(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    assert values["progress"].pop("seconds") > 0
    return values


def timeless(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time") and k != "tokens_per_second"} for r in records]


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_after_any_step_ends_as_the_undisturbed_one(
    case: str, make_recipe: Any, judge: Path, tmp_path: Path
) -> None:
    full = run(load_settings(recipe_of(case, make_recipe, tmp_path / "full", judge)))
    assert [record["step"] for record in full.metrics] == list(range(1, STEPS + 1))
    role = "judge" if case == "reward" else "policy"
    assert sum(record.get(f"gradient_norm/{role}", 0) > 0 for record in full.metrics) >= 3  # there is something to lose
    for step in range(1, STEPS):
        folder = tmp_path / f"after{step}"
        name = stopped_copy(full, step, folder / "run")
        run(load_settings(recipe_of(case, make_recipe, folder, judge, resume=name)))
        assert_same_run(folder / "run", full.folder)


class References:
    """A hook that keeps, by step, the batch and the reference log-probs that it was trained with."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Batch, torch.Tensor]] = {}

    async def __call__(self, moment: Moment) -> Stats:
        assert moment.batch is not None and moment.batch.reference is not None
        self.seen[moment.progress.step] = (moment.batch, moment.batch.reference)
        return {}


def logprobs_by(model: Path, batch: Batch) -> torch.Tensor:
    column = Scorer(load_model(str(model)), Role.REFERENCE).annotate(batch).reference
    assert column is not None
    return column


def test_reference_columns_of_a_resumed_run_are_those_of_the_first_weights(make_recipe: Any, tmp_path: Path) -> None:
    """Computed once, by the model that the run started from: neither lost, nor taken from the weights trained since."""
    start = run(load_settings(make_recipe("sft", tmp_path / "start"))).model
    more = {"data": {"limit": 8}, "save": {"every": 1, "keep": 0}, "train": {"steps": STEPS}}
    recipe = make_recipe("dpo", tmp_path / "full", **more) | {"model": {"path": str(start)}}
    full, found = run(load_settings(recipe), hooks=[whole := References()]), References()
    name = stopped_copy(full, 2, tmp_path / "resumed/run")
    resumed = recipe | {"output": str(tmp_path / "resumed"), "resume": name}
    run(load_settings(resumed), hooks=[found])
    assert_same_run(tmp_path / "resumed/run", full.folder)
    assert sorted(found.seen) == [3, 4]
    trained = full.checkpoint("policy", name)
    for step, (batch, column) in found.seen.items():
        assert torch.equal(column, whole.seen[step][1])
        torch.testing.assert_close(column, logprobs_by(start, batch), atol=1e-4, rtol=0)
        assert float((column - logprobs_by(trained, batch)).abs().max()) > 0.01

    # The comparison above tells them apart: by the trained weights' columns the run ends elsewhere.
    stopped_copy(full, 2, tmp_path / "wrong/run")
    record = (
        tmp_path / "wrong/run/settings.yaml"
    )  # a run of another reference is refused: this one shall have been of it
    before = record.read_text()
    record.write_text(before.replace("reference:\n  path: null", f"reference:\n  path: {trained}"))
    assert record.read_text() != before
    wrong = run(
        load_settings(merged(resumed, {"output": str(tmp_path / "wrong"), "reference": {"path": str(trained)}}))
    )
    assert timeless(wrong.folder / "metrics.jsonl")[:2] == timeless(full.folder / "metrics.jsonl")[:2]
    with pytest.raises(AssertionError):
        assert_same_checkpoint(wrong.folder, full.folder)
