"""`plaudit settings`: every setting with what it does, in part or beside a recipe; and words of other systems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from test_check import LIGHT
from told import says

from plaudit.commands.cli import main
from plaudit.settings.recipes import load_settings
from plaudit.settings.tree import resolved


def plaudit(*words: str | Path) -> Any:
    return CliRunner().invoke(main, [*map(str, words)])


def test_a_key_is_a_setting_a_section_or_a_last_word() -> None:
    assert yaml.safe_load(plaudit("settings", "grpo", "rollout.max_tokens").output) == {"rollout": {"max_tokens": 64}}
    assert set(yaml.safe_load(plaudit("settings", "grpo", "train").output)["train"]) >= {"steps", "epochs"}
    found = yaml.safe_load(plaudit("settings", "sft", "learning_rate").output)
    assert found == {"optimizer": {"learning_rate": 1e-5}, "critic": {"learning_rate": 1e-5}}


def test_a_recipes_values_stand_beside_the_defaults_and_load_again(make_recipe: Any, tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    rewards = [
        {"kind": "length", "options": {"target": 3}},
        {"kind": "length", "name": "two", "options": {"target": 1}},
    ]
    file.write_text(yaml.safe_dump(make_recipe("grpo", tmp_path) | {"rewards": rewards}), encoding="utf-8")
    done = plaudit("settings", "grpo", "--recipe", file)
    assert "  max_tokens: 10  # by default 64\n" in done.output
    assert "  slots: 8  # by default 64\n" in done.output
    assert "  temperature: 1.0\n" in done.output
    (tmp_path / "again.yaml").write_text(done.output, encoding="utf-8")
    assert resolved(load_settings(tmp_path / "again.yaml")) == resolved(load_settings(file))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("evaluate", "sampling.samples"), "# Answers to each prompt. At least 1.\n  samples: 1"),
        (("pipeline", "only"), "only: []"),
        (("pipeline", "evaluation.examples"), "examples: 5"),
        (("generate", "sampling.max_tokens"), "  max_tokens: 64"),
        (("generate", "device"), "One of auto, cpu, cuda, cuda:NUMBER.\ndevice: auto"),
        (("serve",), "--port 8000"),
        (("serve-reward",), "--port 8008"),
        (("relabel", "ties"), "drop, keep.\nties: drop"),
        (("compare", "examples"), "examples: 5"),
    ],
)
def test_other_commands_explain_theirs_too(words: tuple[str, ...], told: str) -> None:
    done = plaudit("settings", *words)
    assert done.exit_code == 0, done.output
    assert told in done.output
    assert "Sentinel" not in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("settings", "sft", "lr"), "lr of sft: .. optimizer.learning_rate"),
        (("settings", "sft", "rollot"), "rollot .. mean rollout"),
        (("settings", "generate", "sampels"), "sampels .. mean samples"),
        (("sft", "r.yaml", "--learning_rate", "1e-5"), "here optimizer.learning_rate=1e-5"),
        (("sft", "r.yaml", "--learning-rate=1e-5"), "here optimizer.learning_rate=1e-5"),
        (("grpo", "r.yaml", "--bf16"), "here learn.precision=bfloat16"),
        (("dpo", "r.yaml", "--train.steps", "5"), "here train.steps=5"),
        (("check", "r.yaml", "--max_steps", "5"), "here train.steps=5"),
        (("dpo", "r.yaml", "--beta", "1"), "here algorithm.beta=1"),
        (("generate", "m", "--temperature", "0"), "here sampling.temperature=0"),
        (("generate", "m", "--max-tokens=8"), "here sampling.max_tokens=8"),
        (("generate", "m", "Two?"), "'Two?' .. --prompt TEXT"),
        (("evaluate", "max_new_tokens=5"), "here it is sampling.max_tokens"),
        (("evaluate", "rollout.top_p=1"), "here it is sampling.top_p"),
        (("evaluate", "thread=1"), "mean threads"),
        (("serve-reward", "m", "thread=1"), "mean threads"),
        (("sft", "deepspeed=F"), "as --deepspeed FILE"),
        (("sft", "."), ". is a folder"),
        (("dpo",), "plaudit init dpo"),
        (("grpo", "rewards=[{kind: function}]"), "function needs function"),
    ],
)
def test_a_wrong_key_or_flag_is_answered_with_ours(words: tuple[str, ...], told: str) -> None:
    done = plaudit(*words)
    assert done.exit_code == 2
    assert says(done.output, told)


@pytest.mark.slow
def test_torch_is_not_loaded(environment: dict[str, str]) -> None:
    words = [sys.executable, "-c", LIGHT.replace("end.code", "end.code or 0"), "settings", "ppo"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
