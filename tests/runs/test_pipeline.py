"""Stages that start from what the stages before them made, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from told import says

from plaudit import load_pipeline, run_pipeline
from plaudit.commands.demo import RECIPE, demo_data, run_task
from plaudit.settings.tree import SettingsError

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(make_recipe: Any, demo: Any, tmp_path: Path) -> dict[str, Any]:
    """SFT from nothing, a judge and PPO from its policy."""
    sft, reward, ppo = (make_recipe(method, tmp_path, train={"steps": 2}) for method in ("sft", "reward", "ppo"))
    own = ("method", "name", "output", "model")
    stages = {recipe["method"]: {k: v for k, v in recipe.items() if k not in own} for recipe in (sft, reward, ppo)}
    stages["sft"]["model"] = sft["model"]
    stages["ppo"]["rewards"] = [{"kind": "judge"}]
    return {"name": "whole", "output": str(tmp_path), "shared": {"seed": 5, "threads": 1}, "stages": stages}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_each_stage_starts_from_the_ones_before(recipe: dict[str, Any], demo: Any, tmp_path: Path) -> None:
    recipe["evaluation"] = {"prompts": str(demo.prompts_test), "limit": 2, "sampling": {"max_tokens": 6}}
    done = run_pipeline(load_pipeline(recipe))
    assert list(done.stages) == ["sft", "reward", "ppo"]
    assert [len(run.metrics) for run in done.stages.values()] == [2, 2, 2]
    settings = {name: (run.folder / "settings.yaml").read_text() for name, run in done.stages.items()}
    policy, judge = (str(done.stages[name].model) for name in ("sft", "reward"))
    assert f"path: {policy}" in settings["reward"]
    assert f"path: {policy}" in settings["ppo"]
    assert f"path: {judge}" in settings["ppo"]
    assert "seed: 5" in settings["ppo"]
    assert abs(done.stages["ppo"].metrics[0]["kl/reference"]) < 1e-4  # it starts at its reference: the SFT policy
    assert done.evaluation is not None

    records = {name: (run.folder / "metrics.jsonl").read_text() for name, run in done.stages.items()}
    before = {name: weights(run.model) for name, run in done.stages.items()}
    again = run_pipeline(load_pipeline(recipe, ["resume=latest"]))
    for name, run in again.stages.items():  # finished stages are passed over
        assert (run.folder / "metrics.jsonl").read_text() == records[name]
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in weights(run.model).items())


def test_a_single_policy_is_compared_with_the_model_that_it_began_from(
    recipe: dict[str, Any], demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"prompts": str(demo.prompts_test), "limit": 3, "sampling": {"max_tokens": 6}}
    first = {**recipe, "name": "first", "stages": {"sft": recipe["stages"]["sft"]}, "evaluation": evaluation}
    alone = run_pipeline(load_pipeline(first))
    assert alone.evaluation is None  # it began from nothing
    assert "nothing to compare it with" in capsys.readouterr().out
    base = alone.stages["sft"].model
    more = {**first, "name": "more", "stages": {"sft": {**first["stages"]["sft"], "model": {"path": str(base)}}}}
    done = run_pipeline(load_pipeline(more)).evaluation
    assert done is not None
    assert done.before["distinct_1"] > 0
    assert done.after["kl"] != 0  # two steps further


def test_an_interrupted_pipeline_goes_on_where_it_stopped(recipe: dict[str, Any], tmp_path: Path) -> None:
    broken = json.loads(json.dumps(recipe))
    broken["stages"]["ppo"]["rewards"].append({"kind": "function", "function": f"{__file__}:fails"})
    with pytest.raises(RuntimeError, match="100%"):
        run_pipeline(load_pipeline(broken))
    records = (tmp_path / "whole/sft/metrics.jsonl").read_text()
    done = run_pipeline(load_pipeline(recipe, ["resume=latest"]))
    assert (tmp_path / "whole/sft/metrics.jsonl").read_text() == records
    assert [record["step"] for record in done.stages["ppo"].metrics] == [1, 2]


def fails() -> float:
    raise ValueError("no")


def test_only_runs_some_stages_on_what_others_left(recipe: dict[str, Any], tmp_path: Path) -> None:
    run_pipeline(load_pipeline(recipe, ["only=[sft]"]))
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["sft"]
    done = run_pipeline(load_pipeline(recipe, ["only=[reward]"]))
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["reward", "sft"]
    assert done.stages["reward"].model.parent.name == "judge"


@pytest.mark.parametrize(
    ("change", "overrides", "told"),
    [
        ({}, ["ppo.train.stepps=1"], "stage ppo: .. train.stepps .. mean train.steps"),
        ({}, ["shared.sed=1"], "stage sft: .. sed .. mean seed"),
        ({}, ["pppo.train.steps=1"], "there is no setting pppo"),
        ({}, ["only=[rewrd]"], "'rewrd' .. mean reward"),
        ({"stages": {}}, [], "needs `stages`"),
        ({"stage": {}}, [], "stage .. mean stages"),
    ],
)
def test_every_stage_is_checked_before_the_first_one_starts(
    recipe: dict[str, Any], tmp_path: Path, change: dict[str, Any], overrides: list[str], told: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        run_pipeline(load_pipeline(recipe | change, overrides))
    assert says(caught.value, told)
    assert not (tmp_path / "whole").exists()


def test_overrides_reach_stages_shared_and_the_pipeline(recipe: dict[str, Any]) -> None:
    settings = load_pipeline(recipe, ["ppo.train.steps=9", "shared.seed=8", "name=other"])
    assert settings.stages["ppo"]["train"]["steps"] == 9
    assert settings.shared == {"seed": 8, "threads": 1}
    assert settings.name == "other"
    assert recipe["stages"]["ppo"]["train"]["steps"] == 2  # the given mapping is not changed


def test_a_section_of_a_run_goes_over_that_of_every_stage() -> None:
    recipe = {"stages": {"sft": {"seed": 1, "rollout": {"max_tokens": 5}}, "ppo": None}}
    found = load_pipeline(recipe, ["runtime=ray", "runtime.max_failures_per_hour=7", "rollout.workers=2", "seed=3"])
    for stage in found.stages.values():
        assert stage["runtime"] == {"kind": "ray", "max_failures_per_hour": 7}
        assert stage["rollout"]["workers"] == 2
        assert stage["seed"] == 3
    assert found.stages["sft"]["rollout"]["max_tokens"] == 5
    with pytest.raises(SettingsError, match="runtimes"):
        load_pipeline(recipe, ["runtimes=ray"])


@pytest.mark.parametrize(
    "override", ["sft.overwrite=true", "sft.resume=latest", "sft.name=mine", "shared.output=there"]
)
def test_what_a_stage_cannot_say_is_refused(recipe: dict[str, Any], override: str) -> None:
    """It had no effect, and a run that was in the way stayed there."""
    key = override.partition(".")[2].partition("=")[0]
    with pytest.raises(SettingsError, match=f"stage sft: {key}=.* set {key} of the whole pipeline"):
        run_pipeline(load_pipeline(recipe, [override]))
    run_pipeline(load_pipeline(recipe, ["sft.name=sft", "sft.train.steps=1", "only=[sft]"]))


def test_the_demo_is_told_by_an_option_where_to_write(tmp_path: Path) -> None:
    """Its last pictures would not be found where a setting moves the runs away from its data."""
    for moved in ("output=elsewhere", "name=other"):
        with pytest.raises(SettingsError, match=rf"{moved}: .*--output"):
            run_task(RECIPE, demo_data, tmp_path / "demo", seeds=(0,), overrides=[moved])
    assert not (tmp_path / "demo").exists()


def test_a_task_of_one_seed_has_its_figures_too(recipe: dict[str, Any], demo: Any, tmp_path: Path) -> None:
    gold = "plaudit.tasks.demo:gold_reward"
    evaluation = {"prompts": str(demo.prompts_test), "limit": 4, "sampling": {"max_tokens": 6}, "gold": gold}
    file = tmp_path / "task.json"
    file.write_text(json.dumps({"shared": recipe["shared"], "stages": recipe["stages"], "evaluation": evaluation}))
    run_task(file, lambda folder, seed, reporter: None, tmp_path / "task", seeds=[3], overrides=[])
    found = json.loads((tmp_path / "task/seeds.json").read_text())
    assert found["seeds"] == [3]
    assert len(found["figures"]["gold reward after"]["values"]) == 1
