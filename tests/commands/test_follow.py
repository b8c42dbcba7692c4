"""A run's checkpoints, evaluated beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plaudit import Run, load_settings, run
from plaudit.commands.follow import follow
from plaudit.evaluate.settings import EvaluationSettings
from plaudit.monitor.console import Reporter
from plaudit.page.app import RunsReader
from plaudit.settings.tree import SettingsError
from plaudit.tasks.demo import DemoFiles


def measured(folder: Path, demo: DemoFiles) -> EvaluationSettings:
    return EvaluationSettings(model=str(folder), demonstrations=str(demo.sft_validation), device="cpu")


@pytest.fixture
def recipe(make_recipe: Any, tmp_path: Path) -> Any:
    return make_recipe("sft", tmp_path, train={"steps": 3}, save={"every": 1, "keep": 0})


@pytest.mark.slow
def test_a_run_is_followed_to_its_end_and_each_checkpoint_measured_once(
    recipe: Any, demo: DemoFiles, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "plaudit.commands.cli", "sft", str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as training:
        while not (found := list(tmp_path.rglob("log.txt"))):
            assert training.poll() is None
            time.sleep(0.05)
        folder = found[0].parent
        names = follow(measured(folder, demo), Reporter(quiet=True), pause=0.05)
    assert names == Run(folder).saved
    assert len(names) == 3
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name, line in zip(names, lines, strict=True):
        kept = json.loads((folder / "evaluations" / name / "evaluation.json").read_text())["figures"]
        assert line["evaluation/perplexity"] == kept["perplexity"]["value"]
    columns = RunsReader(tmp_path).metrics({"run": folder.relative_to(tmp_path).as_posix()})
    assert columns["step"] == [1, 2, 3]
    assert columns["evaluation/perplexity"] == [line["evaluation/perplexity"] for line in lines]
    assert None not in columns["loss/policy"]
    assert follow(measured(folder, demo), Reporter(quiet=True)) == []


def test_a_checkpoint_that_goes_meanwhile_is_told_and_left_out(
    recipe: Any, demo: DemoFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(load_settings(recipe))
    first, *others = done.saved
    listed = Run.saved.fget  # type: ignore[attr-defined]

    def pruned(self: Run) -> list[str]:
        """As the run prunes between the look and the evaluation."""
        names: list[str] = listed(self)
        shutil.rmtree(done.folder / "checkpoints" / "policy" / first, ignore_errors=True)
        return names

    monkeypatch.setattr(Run, "saved", property(pruned))
    assert follow(measured(done.folder, demo), Reporter(), pause=0.05) == others
    said = capsys.readouterr().out
    assert f"{first} was removed" in said
    assert "save.keep=0" in said


def test_what_is_no_run_is_refused(demo: DemoFiles, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--follow"):
        follow(measured(tmp_path, demo), Reporter(quiet=True))


def test_a_run_that_was_killed_is_followed_no_longer(recipe: Any, demo: DemoFiles, tmp_path: Path) -> None:
    done = run(load_settings(recipe))
    log = done.folder / "log.txt"
    log.write_text(log.read_text().partition("done:")[0].rpartition("\n")[0] + "\n")
    for path in done.folder.glob("*.*"):
        os.utime(path, (1.0, 1.0))  # nothing was written for long
    assert follow(measured(done.folder, demo), Reporter(quiet=True), pause=0.05) == done.saved
