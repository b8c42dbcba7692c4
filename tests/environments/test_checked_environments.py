"""`plaudit check` finds what an environment lacks, and its prompts show the tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worlds

from plaudit.preflight.check import Preflight, preflight
from plaudit.preflight.checking import lines

WORLDS = Path(worlds.__file__)
Recipe = Callable[..., dict[str, Any]]


def checked(make_recipe: Recipe, tmp_path: Path, **more: Any) -> Preflight:
    recipe = make_recipe("grpo", tmp_path, data={"chat_template": "default", "as_chat": True, "max_prompt_tokens": 600})
    recipe["model"]["config"]["n_positions"] = 1024
    recipe["rewards"] = [{"kind": "environment"}]
    recipe["environment"] = {"function": f"{WORLDS}:Sums", "max_tokens": 200}
    return preflight({**recipe, **more}, (), method=None)


def test_prompts_show_the_tools(make_recipe: Recipe, tmp_path: Path) -> None:
    found = checked(make_recipe, tmp_path)
    assert [one.text for one in found.findings if one.problem] == []
    shown = "".join(str(part) for part in found.previews[0].rows[0])
    assert '"name": "add"' in shown and '"name": "wait"' in shown


def test_an_episode_is_played_without_a_model(make_recipe: Recipe, tmp_path: Path) -> None:
    """`add` is the first tool of Sums, with whole numbers; then the reference ends the episode."""
    found = checked(make_recipe, tmp_path)
    said = [line.partition(":")[0] for line in found.episode]
    assert said[:3] == ["assistant", "tool", "assistant"]
    assert "add" in found.episode[0] and found.episode[1] == "tool: 2"
    assert found.episode[-1].startswith("reward ")
    assert any("an episode of the first prompt" in line for line in lines(found))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"environment": {"function": f"{WORLDS}:Sum"}}, "has no 'Sum'; did you mean Sums?"),
        ({"environment": {"function": f"{WORLDS}:Nothing"}}, "neither a method step"),
        ({"environment": {"tools": ["nowhere.py:add"]}}, "there is no file"),
        ({"environment": {"options": {"a": 1}}}, "options are for an environment's class"),
        ({"data": {"train": "x", "as_chat": False}}, "the episodes of an environment are chats"),
        ({"rewards": [{"kind": "http", "urls": ["http://127.0.0.1:1"]}]}, "kind http reads no episodes"),
        ({"method": "sft"}, "sft learns from data and plays no episodes"),
    ],
)
def test_what_cannot_be_played_is_a_problem(
    more: dict[str, Any], says: str, make_recipe: Recipe, tmp_path: Path
) -> None:
    found = checked(make_recipe, tmp_path, **more)
    assert any(says in one.text for one in found.findings if one.problem), [one.text for one in found.findings]
