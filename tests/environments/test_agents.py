"""Agents that ask the policy over HTTP: their requests are turns of an episode, as sampled, each trained once."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import agency
import pytest
import rendering
from playing import WORLDS, Table, of
from scripted import Scripted
from test_chat_server import THINKS

from plaudit.data.chat import Chats
from plaudit.data.settings import DataSettings
from plaudit.environments.agents import AgentPlayer, Agents, _agents_loop, world_of
from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.settings import EnvironmentSettings
from plaudit.rollout.figures import rollout_figures
from plaudit.support.plugins import load_object
from plaudit.types import Completion, Finish, Group, Response, Sampling, Score

AGENCY = str(Path(agency.__file__))


def settings(name: str, **more: Any) -> EnvironmentSettings:
    own = {"kind": "agent", "max_tokens": 300, **more}
    return EnvironmentSettings(function=f"{AGENCY}:{name}", **own)


def play(table: Table, name: str, count: int = 2, engine: Any = None, **more: Any) -> list[Completion]:
    sampling = {"max_tokens": 6} | more.pop("sampling", {})
    plan = [Sampling(seed=seed, **sampling) for seed in range(count)]
    player = AgentPlayer(engine or table.engine, table.chats, Agents(settings(name, **more)))
    return asyncio.run(player.play(table.prompt, plan))


def nothing_logged(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether asyncio had no exception to log that nobody read."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), _agents_loop()).result()
    gc.collect()
    return not caplog.records


def rewards(answers: list[Completion]) -> list[Any]:
    return [of(one).earned.value for one in answers]  # type: ignore[union-attr]


@pytest.mark.parametrize("renderer", ["", f"{rendering.__file__}:Lines", f"{rendering.__file__}:Again"])
def test_an_agent_that_does_as_a_class_does_has_the_same_record(renderer: str, table: Table) -> None:
    """Greedy, since seeds are of requests here and of turns there."""
    greedy = {"temperature": 0.0, "max_tokens": 40, "min_tokens": 4}
    (agents,) = play(table, "echoes", count=1, sampling=greedy, renderer=renderer)
    plan = [Sampling(seed=0, **greedy)]
    own = EnvironmentSettings(function=f"{WORLDS}:Echo", max_tokens=300, renderer=renderer)
    (other,) = asyncio.run(Player(table.engine, table.chats, World(own)).play(table.prompt, plan))
    assert [*agents.tokens] == [*other.tokens]
    assert [*agents.logprobs] == [*other.logprobs]
    assert [*of(agents).sampled] == [*of(other).sampled]
    assert of(agents).earned == of(other).earned and rewards([agents])[0] > 0
    assert agents.text == other.text and agents.finish is other.finish is Finish.EOS
    assert [*of(agents).sequences(table.prompt.tokens)] == [*of(other).sequences(table.prompt.tokens)]
    assert of(agents).counts == {"turns": 3.0, "branches": 1.0, "refused": 0.0}


def test_the_librarys_client_and_a_sync_agent_play_too(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rewards(play(table, "waits")) == [len(table.prompt.tokens)] * 2
    pytest.importorskip("openai")
    greedy = {"temperature": 0.0, "max_tokens": 40, "min_tokens": 4}
    (ours,) = play(table, "echoes", count=1, sampling=greedy)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (theirs,) = play(table, "libraries", count=1, sampling=greedy)
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
        assert [one["role"] for one in of(answer).messages] == ["assistant", "assistant", "user", "assistant"]


def test_the_same_request_has_the_same_reply(table: Table) -> None:
    answers = play(table, "repeats", sampling={"max_tokens": 20})
    assert rewards(answers) == [1.0, 1.0]
    assert all(of(one).counts["turns"] == 2 for one in answers), "what was answered twice is in the record once"
    assert rewards(play(table, "stubborn", max_turns=3)) == [400.0, 400.0], "no agent asks for ever"


def test_branches_at_once_are_rows_of_their_own(table: Table) -> None:
    for answer in play(table, "splits"):
        rows = [*of(answer).sequences(table.prompt.tokens)]
        assert len(rows) == 2 and of(answer).counts["turns"] == 3, "one request goes on, the other begins a branch"
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
    [
        ("silent", "asked nothing for 0.5 s"),
        ("fails", "the agent: KeyError: 'board'"),
        ("idle", "answered: it asked nothing"),
        ("cancels", "CancelledError"),
        ("verbose", "leave no room for an answer within"),
    ],
)
def test_a_broken_agent_fails_its_episode_alone(
    name: str, reason: str, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    for answer in play(table, name, **({"timeout": 0.5} if name == "silent" else {})):
        failure = of(answer).failure
        assert failure is not None and reason in str(failure.reason)
    assert nothing_logged(caplog)


def test_what_the_engine_raises_is_raised_whatever_the_agent_makes_of_it(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """So that lost answers are drawn again, and no agent is blamed."""

    class Lost(table.engine.__class__):  # type: ignore[misc, name-defined]
        async def generate(self, tokens: Any, plan: Any) -> Any:
            raise ConnectionError("the worker is lost")

    engine = copy.copy(table.engine)
    engine.__class__ = Lost
    for name in ("stubborn", "fails"):
        with pytest.raises(ConnectionError, match="worker is lost"):
            play(table, name, engine=engine)
    assert nothing_logged(caplog)


def test_figures_are_of_the_episodes_that_have_them(table: Table) -> None:
    """An episode that failed before its first request has no turns, and one without tools no calls."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    with_tools = play(table, "adds", count=1, engine=Scripted(table.tokenizer, [call, "It is 5."]))
    answers = [*play(table, "idle", count=1), *with_tools, *play(table, "echoes", count=1)]
    responses = [Response(completion=one, score=Score(value=0.0), trainable=(), reward=0.0) for one in answers]
    found = rollout_figures([Group(index=0, prompt=table.prompt, responses=responses)])
    assert (found["episode/turns"], found["episode/calls"]) == (pytest.approx(5 / 3), 1.0)


def test_agents_get_copies_and_their_limits_pass(table: Table) -> None:
    assert rewards(play(table, "changes", count=3)) == [3.0] * 3
    for answer in play(table, "recovers"):
        assert answer.finish is Finish.EOS and of(answer).counts["refused"] == 1


def test_what_is_open_at_the_end_is_refused_and_nothing_is_logged(
    table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = load_object(f"{AGENCY}:LEFT")

    class Slow(table.engine.__class__):  # type: ignore[misc, name-defined]
        async def generate(self, tokens: Any, plan: Any) -> Any:
            if not left:
                left.append(0)  # the first request is answered
                return await super().generate(tokens, plan)
            return await asyncio.sleep(30)

    engine, log = copy.copy(table.engine), logging.FileHandler(tmp_path / "log.txt")
    engine.__class__ = Slow
    logging.getLogger("other").addHandler(log)

    async def whole() -> list[Completion]:
        player = AgentPlayer(engine, table.chats, Agents(settings("leaves")))
        answers = await player.play(table.prompt, [Sampling(max_tokens=6)])
        while len(left) < 2:
            await asyncio.sleep(0.05)
        return answers

    assert rewards(asyncio.run(asyncio.wait_for(whole(), 20))) == [1.0]
    assert left == [0, 401]
    logging.getLogger("other").warning("still here")
    assert "still here" in (tmp_path / "log.txt").read_text(), "the server leaves other handlers alone"
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_thoughts_tell_branches_apart_where_a_client_sends_them(table: Table) -> None:
    chats = Chats(table.tokenizer, DataSettings(chat_template=THINKS))
    engine = Scripted(table.tokenizer, ["<think>A</think>yes", "<think>B</think>yes", "Because."])
    own = Agents(settings("thinks"))
    text = chats.prompt(table.asked, {})
    tokens = tuple(table.tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = replace(table.prompt, text=text, tokens=tokens)
    (answer,) = asyncio.run(AgentPlayer(engine, chats, own).play(prompt, [Sampling(max_tokens=40)]))
    asked = table.tokenizer.decode(list(engine.asked[2]), skip_special_tokens=False)
    assert "<think>A</think>yes" in asked and "B" not in asked.replace("Because", "")
    assert of(answer).counts["branches"] == 2


def test_only_keys_of_episodes_are_answered_and_streams_end(table: Table) -> None:
    (answer,) = play(table, "stranger", count=1)
    assert "no request" in str(of(answer).earned.reason)  # type: ignore[union-attr]
    assert rewards(play(table, "shouts", count=1)) == [401.0], "it is not read"
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
