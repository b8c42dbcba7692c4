"""Runs whose checkpoints are copied to an address: resumed on a machine that has nothing of them, used from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kills import same_weights

from plaudit import load_settings, run
from plaudit.commands.cli import main
from plaudit.settings.tree import SettingsError
from plaudit.support import address

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("kind", ["memory", "file", "s3"])
def test_a_run_resumes_from_an_address_on_another_machine_with_the_same_bits(
    kind: str, request: pytest.FixtureRequest, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "cache_folder", lambda: tmp_path / "cache")
    there = (request.getfixturevalue("bucket") if kind == "s3" else f"{kind}://") + f"{tmp_path}/there"
    more = {"train": {"steps": 4}, "optimizer": {"schedule": "constant"}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    recipe = make_recipe("grpo", tmp_path / "here", **more, save={"every": 1, "to": there})
    first = run(load_settings(recipe, ["train.steps=2"]))
    with pytest.raises(SettingsError, match="overwrite=true"):
        run(load_settings(recipe, [f"output={tmp_path}/other"]))
    shutil.rmtree(first.folder)
    with pytest.raises(SettingsError, match="seed: 0 there"):
        run(load_settings(recipe, ["resume=latest", "seed=5"]))
    resumed = run(load_settings(recipe, ["resume=latest"]))
    assert [step["step"] for step in resumed.metrics] == [1, 2, 3, 4]
    assert same_weights(whole, resumed)
    out = tmp_path / "answers.jsonl"
    given = [f"{there}/{first.folder.name}", "--prompt", "We saw", "sampling.max_tokens=3", f"output={out}"]
    done = CliRunner().invoke(main, ["generate", *given])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text().splitlines()[0])["completion"]
    recipe["model"] = {"path": f"{there}/{first.folder.name}"}
    again = run(load_settings(recipe, ["overwrite=true", "train.steps=1"]))
    assert again.saved == ["epoch1epochstep1globalstep1"]


def test_an_address_without_its_package_is_refused_before_anything_starts(make_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"save\.to.*pip install adlfs"):
        run(load_settings(make_recipe("sft", tmp_path / "run", save={"to": "abfs://box@account/runs"})))
    assert not (tmp_path / "run").exists()


def test_a_bucket_that_is_not_there_is_refused_before_anything_starts(
    bucket: str, make_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"save\.to: .*s3://no-such-bucket/runs/run: .*make its bucket"):
        run(load_settings(make_recipe("sft", tmp_path / "run", save={"to": "s3://no-such-bucket/runs"})))
    assert not (tmp_path / "run").exists()
