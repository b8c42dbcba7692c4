"""A run finds the plan of its own settings, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plaudit.runs.planned import key_of, planned
from plaudit.settings.recipes import read_settings
from plaudit.settings.tree import Settings


def settings(*words: str) -> Settings:
    return read_settings(None, ["model.path=x", *words], method="ppo")


def test_a_plan_is_found_by_the_settings_that_its_seconds_depend_on(tmp_path: Path) -> None:
    calls = {"generate": 3.0, "judge 0": 2.0, "gold": 1.0, "critic scores": 0.5, "policy trains": 4.0, "publish": 0.25}
    plans = {
        "best": {"key": "other", "step": 1.0, "calls": {}},
        "now": {"key": key_of(settings()), "step": 10.75, "calls": calls},
    }
    (tmp_path / "run.plan.json").write_text(json.dumps({"plans": plans}))
    found = planned(settings("name=run", "train.steps=9", "seed=4"), tmp_path / "run")
    assert found == {"step": 10.75, "generate": 3.0, "rewards": 3.0, "learn": 4.5}
    assert planned(settings("rollout.max_tokens=9"), tmp_path / "run") == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plans": {"now": {}}}'])
def test_a_file_that_is_no_plan_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.plan.json").write_text(text)
    assert planned(settings(), tmp_path / "run") == {}
