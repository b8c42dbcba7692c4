"""Tasks of verifiers that its own harness plays against the policy. Its processes need uv, and a package index once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from playing import Table, of
from scripted import Scripted

pytest.importorskip("verifiers.v1", reason="pip install verifiers==0.4.0 uv, in an environment of its own")

from plaudit.environments.agents import AgentPlayer, Agents
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Completion, Finish, Sampling

AGENT = Path(__file__).parents[2] / "examples" / "environments" / "verifiers_agent.py"
TWICE = Path(__file__).with_name("second_turn.py")


def play(table: Table, texts: list[str], agent: Path = AGENT, count: int = 1, **more: Any) -> list[Completion]:
    limits = {"max_tokens": 300, "timeout": 120.0, **more}
    own = EnvironmentSettings(kind="agent", function=f"{agent}:solve", **limits)
    plan = [Sampling(seed=seed, max_tokens=20) for seed in range(count)]
    player = AgentPlayer(Scripted(table.tokenizer, texts), table.chats, Agents(own))
    return asyncio.run(player.play(table.prompt, plan))


def test_a_task_is_played_by_verifiers_and_its_reward_is_the_episodes(table: Table) -> None:
    keys = [name for name in os.environ if "API_KEY" in name]
    answers = play(table, ["It is 4.", "It is 4."], count=2)
    for answer in answers:
        earned = of(answer).earned
        assert earned is not None and (earned.value, dict(earned.parts)) == (1.0, {"words": 3.0}), earned
        assert [dict(one) for one in of(answer).messages] == [{"role": "assistant", "content": "It is 4."}]
        (row,) = of(answer).sequences(table.prompt.tokens)
        assert tuple(row[0]) == tuple(table.prompt.tokens) and answer.finish is Finish.EOS
    assert keys == [name for name in os.environ if "API_KEY" in name], "keys of episodes are gone"


def test_a_users_second_turn_goes_on_from_the_first(table: Table) -> None:
    (answer,) = play(table, ["It is 3.", "No, 4."], TWICE)
    assert of(answer).earned.value == 1.0  # type: ignore[union-attr]
    assert of(answer).counts == {"turns": 2.0, "branches": 1.0, "refused": 0.0}
    assert [one["content"] for one in of(answer).messages] == ["It is 3.", "Are you sure?", "No, 4."]
    assert len([*of(answer).sequences(table.prompt.tokens)]) == 1, "one row, as sampled"


def test_a_refused_request_leaves_the_episode_unfinished(table: Table) -> None:
    (answer,) = play(table, ["It is 3."], TWICE, max_turns=1)
    assert answer.finish is Finish.TURNS and of(answer).counts["refused"] >= 1
    assert of(answer).earned.value == 0.0  # type: ignore[union-attr]


def test_a_trace_that_failed_fails_its_episode(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (answer,) = play(table, [])
    assert "harness_error" in str(of(answer).failure.reason)  # type: ignore[union-attr]
