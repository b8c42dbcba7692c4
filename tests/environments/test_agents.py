"""Agents that ask the policy over HTTP: their requests are turns of an episode, as sampled, each trained once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import agency
import pytest
from playing import WORLDS, Table, of
from scripted import Scripted

from plaudit.environments.agents import AgentPlayer, Agents, world_of
from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Completion, Finish, Sampling

AGENCY = str(Path(agency.__file__))


def settings(name: str, **more: Any) -> EnvironmentSettings:
    own = {"kind": "agent", "max_tokens": 300, "timeout": 5.0, **more}
    return EnvironmentSettings(function=f"{AGENCY}:{name}", **own)


def play(table: Table, name: str, count: int = 2, engine: Any = None, **more: Any) -> list[Completion]:
    sampling = {"max_tokens": 6} | more.pop("sampling", {})
    plan = [Sampling(seed=seed, **sampling) for seed in range(count)]
    player = AgentPlayer(engine or table.engine, table.chats, Agents(settings(name, **more)))
    return asyncio.run(player.play(table.prompt, plan))


def rewards(answers: list[Completion]) -> list[Any]:
    return [of(one).earned.value for one in answers]  # type: ignore[union-attr]


def test_an_agent_that_does_as_a_class_does_has_the_same_record(table: Table) -> None:
    """Greedy, since seeds are of requests here and of turns there."""
    greedy = {"temperature": 0.0, "max_tokens": 40, "min_tokens": 4}
    (agents,) = play(table, "echoes", count=1, sampling=greedy)
    plan = [Sampling(seed=0, **greedy)]
    own = EnvironmentSettings(function=f"{WORLDS}:Echo", max_tokens=300)
    (other,) = asyncio.run(Player(table.engine, table.chats, World(own)).play(table.prompt, plan))
    assert [*agents.tokens] == [*other.tokens]
    assert [*agents.logprobs] == [*other.logprobs]
    assert [*of(agents).sampled] == [*of(other).sampled]
    assert of(agents).earned == of(other).earned and rewards([agents])[0] > 0
    assert agents.text == other.text and agents.finish is other.finish is Finish.EOS
    assert [*of(agents).sequences(table.prompt.tokens)] == [*of(other).sequences(table.prompt.tokens)]
    assert of(agents).counts == {"turns": 3.0, "branches": 1.0, "refused": 0.0}


def test_the_librarys_client_and_a_sync_agent_play_too(table: Table) -> None:
    assert rewards(play(table, "waits")) == [len(table.prompt.tokens)] * 2
    pytest.importorskip("openai")
    greedy = {"temperature": 0.0, "max_tokens": 40, "min_tokens": 4}
    ours, theirs = (play(table, name, count=1, sampling=greedy)[0] for name in ("echoes", "libraries"))
    assert [*ours.tokens] == [*theirs.tokens]
    assert rewards([ours]) == rewards([theirs])


def test_an_episode_depends_on_its_seed_alone(table: Table) -> None:
    first, again = (play(table, "echoes", count=3) for _ in range(2))
    assert [[*one.tokens] for one in first] == [[*one.tokens] for one in again]
    assert len({tuple(one.tokens) for one in first}) == 3


def test_a_rewritten_history_is_a_further_row_and_each_turn_is_trained_once(table: Table) -> None:
    for answer in play(table, "forgets"):
        (_, one), (prefix, two) = of(answer).sequences(table.prompt.tokens)
        assert one.stop == two.start and two.stop == len(answer.tokens) == answer.length
        first, second = (table.tokenizer.decode(answer.tokens[part]) for part in (one, two))
        chat = [{"role": "assistant", "content": of(answer).messages[1]["content"]}]
        text = table.chats.prompt([*chat, {"role": "user", "content": "And then?"}], {})
        assert list(prefix) == table.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert first and second and of(answer).counts["branches"] == 2
        assert [one["role"] for one in of(answer).messages] == ["user", "assistant", "assistant", "user", "assistant"]


def test_the_same_request_has_the_same_reply(table: Table) -> None:
    answers = play(table, "repeats", sampling={"max_tokens": 20})
    assert rewards(answers) == [1.0, 1.0]
    assert all(of(one).counts["turns"] == 2 for one in answers), "what was answered twice is in the record once"


def test_branches_at_once_are_rows_of_their_own(table: Table) -> None:
    for answer in play(table, "splits"):
        rows = [*of(answer).sequences(table.prompt.tokens)]
        assert len(rows) == 2 and of(answer).counts["turns"] == 3, "one goes on, the other begins anew"
        assert sum(of(answer).sampled) == answer.length
        assert [end + 1 for end in of(answer).ends][1:] == [rows[0][1].stop, len(answer.tokens)]
        assert tuple(rows[1][0])[: len(table.prompt.tokens)] == tuple(rows[0][0]) == table.prompt.tokens


def test_a_tool_of_the_agents_is_called_and_its_result_read(table: Table) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    engine = Scripted(table.tokenizer, [call, "It is 5."])
    (answer,) = play(table, "adds", count=1, engine=engine)
    assert rewards([answer]) == [1.0]
    counts = {"calls": 1.0, "failed_calls": 0.0, "unread_calls": 0.0, "branches": 1.0, "refused": 0.0}
    assert of(answer).counts == {"turns": 2.0, **counts}
    first, second = (table.tokenizer.decode(list(context), skip_special_tokens=False) for context in engine.asked)
    assert json.dumps(agency.ADD["function"]["description"]) in first  # type: ignore[index]
    assert second.startswith(first + call) and "5" in second[len(first + call) :]


@pytest.mark.parametrize(
    ("limits", "finish", "turns"),
    [({"max_turns": 3}, Finish.TURNS, 3), ({"max_tokens": 40}, Finish.LENGTH, None)],
)
def test_limits_refuse_a_request_and_leave_the_episode_unfinished(
    limits: dict[str, int],
    finish: Finish,
    turns: int | None,
    table: Table,
) -> None:
    for name, worth in (("endless", 0.0), ("patient", 0.25)):
        for answer in play(table, name, **limits):
            assert answer.finish is finish and rewards([answer]) == [worth]
            assert of(answer).counts["refused"] == 1 and turns in (None, of(answer).counts["turns"])
            assert len(answer.tokens) <= limits.get("max_tokens", 300)
            assert of(answer).sampled[-1], "what nobody answered is no part of it"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("silent", "asked nothing for 0.5 s"), ("fails", "the agent: KeyError: 'board'"), ("idle", "no request")],
)
def test_a_broken_agent_fails_its_episode_alone(name: str, reason: str, table: Table) -> None:
    for answer in play(table, name, timeout=0.5):
        failure = of(answer).failure
        assert failure is not None and reason in str(failure.reason)


def test_only_keys_of_episodes_are_answered_and_streams_end(table: Table) -> None:
    (answer,) = play(table, "stranger", count=1)
    assert "no request" in str(of(answer).earned.reason)  # type: ignore[union-attr]
    assert rewards(play(table, "streams")) == [1.0, 1.0]


def test_what_cannot_play_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="asks nothing"):
        world_of(settings("asks_nothing"))
    with pytest.raises(ValueError, match=r"agency\.py has no 'echo'"):
        world_of(settings("echo"))
    assert Agents(settings("endless")).needed == ["answer"]
    monkeypatch.setattr("plaudit.environments.agents.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="package openai is missing: pip install openai"):
        world_of(settings("libraries"))
    assert [*EnvironmentSettings(kind="agent", tools=["x"]).contradictions()]
