"""Whole runs whose samples may be old, in this process; with real Ray processes they are in test_ray_runs.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.runs.pipeline import merged
from plaudit.tasks.demo import DemoFiles

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]


def same_weights(first: Run, second: Run) -> bool:
    ours, theirs = (load_file(found.model / "model.safetensors") for found in (first, second))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("interrupt", [True, False])
def test_new_weights_take_over_answers_under_way_or_wait_for_their_end(
    make_recipe: Recipe, tmp_path: Path, interrupt: bool
) -> None:
    rollout = {"max_lag": 1, "interrupt": interrupt, "slots": 4, "max_tokens": 16}
    done = run(load_settings(make_recipe("grpo", tmp_path, rollout=rollout, train={"steps": 8})))
    versions = [sample["versions"] for sample in done.samples]
    assert any(len(mixed) > 1 for mixed in versions) == interrupt
    assert len({version for mixed in versions for version in mixed}) > 4
    assert all(record["lag/max"] <= 1 for record in done.metrics)


def test_without_lag_interrupt_makes_no_difference(make_recipe: Recipe, tmp_path: Path) -> None:
    runs = [
        run(load_settings(make_recipe("grpo", tmp_path / str(interrupt), rollout={"interrupt": interrupt})))
        for interrupt in (True, False)
    ]
    assert same_weights(*runs)


def recorded(make_recipe: Recipe, folder: Path, **more: Any) -> dict[str, Any]:
    """A run that is never the same twice: its rewards are up to chance. What is replaced is not."""
    recipe = make_recipe(
        "grpo",
        folder,
        algorithm={"samples": 3, "dynamic_sampling": True, "minibatches": 2},
        rollout={"max_lag": 1, "slots": 4, "record": True},
        train={"steps": 5},
        save={"every": 1, "keep": 0},
        data={"validation": "20%"},
    )
    recipe["rewards"] = [{"kind": "function", "function": f"{Path(__file__).parents[1] / 'tiny.py'}:chance"}]
    return merged(recipe, more)


def groups(found: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (found.folder / "groups.jsonl").read_bytes().splitlines()]


def figures(found: Run) -> list[dict[str, Any]]:
    """Without times, and without evaluation, which a replay leaves out."""
    passing = ("time", "tokens_per_second", "validation")
    return [{name: v for name, v in record.items() if not name.startswith(passing)} for record in found.metrics]


def test_a_replay_of_a_recorded_run_is_equal_to_the_last_bit(
    make_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(load_settings(recorded(make_recipe, tmp_path / "first")))
    other = run(load_settings(recorded(make_recipe, tmp_path / "other")))
    assert not same_weights(first, other)
    assert sum(record["groups/dropped"] for record in first.metrics) > 0
    assert any(record["lag/max"] == 1 for record in first.metrics)
    assert all("validation/reward/mean" in record for record in first.metrics[-1:])
    overrides = [f"rollout.replay={first.folder}", f"output={tmp_path / 'again'}", "log.quiet=false"]
    again = run(load_settings(first.folder / "settings.yaml", overrides))
    assert same_weights(first, again)
    assert figures(first) == figures(again)
    assert groups(first) == groups(again)
    assert [one for one in first.samples if one["kind"] != "validation"] == again.samples  # a replay evaluates nothing
    assert "the replay's figures equal those of the recorded run, up to step 5" in capsys.readouterr().out


def test_a_record_goes_back_with_its_run(make_recipe: Recipe, tmp_path: Path) -> None:
    """A run is killed behind its second checkpoint, with more on record: what it did afterwards is what is replayed."""
    first = run(load_settings(recorded(make_recipe, tmp_path / "killed")))
    names = {path.name[-1]: path.name for path in (first.folder / "checkpoints" / "state").iterdir()}
    before = groups(first)
    with (first.folder / "groups.jsonl").open("a") as torn:
        torn.write('{"step": 6, "groups": [{"index"')
    resumed = run(load_settings(recorded(make_recipe, tmp_path / "killed"), [f"resume={names['2']}"]))
    assert groups(resumed)[:3] == before[:3]  # the first line tells of threads
    assert [line["step"] for line in groups(resumed)[1:]] == [1, 2, 3, 4, 5]
    assert groups(resumed)[3:] != before[3:]
    replay = {"replay": str(resumed.folder), "record": False}
    again = run(load_settings(recorded(make_recipe, tmp_path / "again", rollout=replay)))
    assert same_weights(resumed, again)
    (newest,) = (again.folder / "checkpoints" / "state").glob("*globalstep5")
    shutil.rmtree(newest)  # a replay resumes as any run does
    third = run(load_settings(recorded(make_recipe, tmp_path / "again", rollout=replay), ["resume=latest"]))
    assert same_weights(resumed, third)


def test_a_replay_ends_where_its_record_ends(make_recipe: Recipe, tmp_path: Path) -> None:
    first = run(load_settings(recorded(make_recipe, tmp_path / "first")))
    lines = (first.folder / "groups.jsonl").read_bytes().splitlines(keepends=True)
    (first.folder / "groups.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:-1])  # the fourth step's line is torn
    replay = {"replay": str(first.folder), "record": False}
    again = run(load_settings(recorded(make_recipe, tmp_path / "again", rollout=replay)))
    assert [record["step"] for record in again.metrics] == [1, 2, 3]
    assert again.model.name.endswith("step3")
    assert figures(again) == figures(first)[:3]


def test_what_does_not_fit_the_record_is_refused(make_recipe: Recipe, demo: DemoFiles, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(demo.prompts.read_text())
    data = {"train": str(prompts), "validation": None}
    first = run(load_settings(recorded(make_recipe, tmp_path / "first", train={"steps": 2}, data=data)))

    def refused(message: str, *overrides: str, **more: Any) -> None:
        rollout = {"replay": str(first.folder), "record": False}
        recipe = recorded(make_recipe, tmp_path / "again", **merged({"rollout": rollout, "data": data}, more))
        with pytest.raises(ValueError, match=message):
            run(load_settings(recipe, ["train.steps=2", *overrides]))

    different = r"other settings.*\n  - seed: 0 there, 1 here\n  - optimizer\.learning_rate: 0\.003 there, 0\.1 here$"
    refused(different, "seed=1", "optimizer.learning_rate=0.1")
    refused(r"threads: 1 there, 2 here", "threads=2")
    refused(r"runtime\.num_training_workers: 1 there, 2 here", "runtime=ray", "runtime.num_training_workers=2")
    refused(r"there is no groups\.jsonl", f"rollout.replay={tmp_path}")
    refused("own folder", f"output={tmp_path / 'first'}", "overwrite=true")
    with pytest.raises(ValueError, match=r"sft .*samples nothing"):
        load_settings(make_recipe("sft", tmp_path, rollout={"replay": str(first.folder)}))
    prompts.write_text("\n".join(reversed(demo.prompts.read_text().splitlines())))
    refused("prompt 0 .*data has changed")


def test_a_record_begins_with_its_run(make_recipe: Recipe, tmp_path: Path) -> None:
    run(load_settings(recorded(make_recipe, tmp_path, train={"steps": 2}, rollout={"record": False})))
    with pytest.raises(ValueError, match=r"step 2, .* 0 steps"):
        run(load_settings(recorded(make_recipe, tmp_path), ["resume=latest"]))
