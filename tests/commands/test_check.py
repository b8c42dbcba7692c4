"""`plaudit check` as a person calls it: its status, its lines, its JSON, and what it does not load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tiny import GPT2

from plaudit.commands.cli import main

LIGHT = (
    "import sys; from plaudit.commands.cli import main\n"
    "try: main(sys.argv[1:])\n"
    "except SystemExit as end: status = end.code\n"
    "heavy = {name for name in sys.modules if name.partition('.')[0] in ('torch', 'ray', 'datasets', 'matplotlib')}\n"
    "assert not heavy, heavy\n"
    "sys.exit(status)\n"
)


@pytest.fixture
def recipe(demo: Any, tmp_path: Path) -> Path:
    model = {"config": GPT2, "tokenizer": str(demo.tokenizer)}
    data = {"train": str(demo.sft), "max_tokens": 128, "max_prompt_tokens": 64}
    file = tmp_path / "recipe.yaml"
    given = {"method": "sft", "output": str(tmp_path / "runs"), "model": model, "data": data}
    file.write_text(yaml.safe_dump(given), encoding="utf-8")
    return file


def check(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["check", *map(str, words)])


def test_rows_are_shown_and_the_status_says_whether_there_are_problems(recipe: Path) -> None:
    sound = check(recipe, "threads=4096", "train.steps=3")
    assert sound.exit_code == 0, "doubts are no problems"
    assert sound.output.count(" | trained: '") == 3
    assert "doubt: threads=4096" in sound.output
    assert "0 problems, 1 doubt" in sound.output
    assert re.search(r"here: (cpu, \d+ cores|cuda, \d+ GPUs), [\d.]+ GiB .* [\d.]+ GiB of disk", sound.output)
    broken = check("sft", recipe, "optimizer.lr=1e-5")
    assert broken.exit_code == 1
    assert "problem: there is no setting optimizer.lr: here it is optimizer.learning_rate" in broken.output


def test_a_recipe_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    absent = check(tmp_path / "absent.yaml")
    assert (absent.exit_code, absent.output.count("problem: there is no recipe")) == (1, 1)
    assert "no method 'pppo'; did you mean ppo?" in check("method=pppo").output


def test_json_has_all_of_it(recipe: Path) -> None:
    done = check(recipe, "--json", "train.step=1")
    told = json.loads(done.stdout)
    (one,) = told["runs"]
    assert (done.exit_code, told["ok"]) == (1, False)
    assert one["problems"] == [
        {"key": "train.step", "text": "there is no setting train.step; did you mean train.steps?"}
    ]
    assert [part["trained"] for part in one["sources"][0]["rows"][0][0]] == [False, True]
    assert one["needs"]["parameters"] > 0


@pytest.mark.slow
def test_torch_is_not_loaded(recipe: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, "check", str(recipe)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
