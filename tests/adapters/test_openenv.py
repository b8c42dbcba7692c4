"""Episodes with a real server of OpenEnv: sessions at once, refused actions, a session that broke."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playing import Table, of
from scripted import Scripted

pytest.importorskip("openenv", reason="pip install openenv")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

from plaudit.environments.base import World
from plaudit.environments.episodes import Player
from plaudit.environments.settings import EnvironmentSettings
from plaudit.types import Completion, Sampling


class Addition(Action):
    number: int


class Sum(Observation):
    text: str
    total: int


class Adder(Environment[Addition, Sum, State]):
    """Adds numbers until they make ten; each step earns a tenth of its number."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    together = threading.Barrier(1)
    ended = list[int]()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Sum:
        self.total = 0
        Adder.together.wait(30)
        return Sum(text=f"Make ten ({seed}).", total=0, reward=0.0)

    def step(self, action: Addition, timeout_s: float | None = None, **more: Any) -> Sum:
        if action.number == 13:
            raise KeyError("thirteen")
        self.total += action.number
        text = f"It is {self.total}."
        return Sum(text=text, total=self.total, reward=action.number / 10, done=self.total >= 10, metadata={"goal": 10})

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        Adder.ended.append(self.total)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_app(Adder, Addition, Sum, env_name="adder", max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


def episodes(table: Table, *said: list[str], **options: str | None) -> list[Completion]:
    """Play an episode for each list of what its policy says, all at once."""
    Adder.together, Adder.ended = threading.Barrier(len(said)), []
    options = {"action": "number", "observation": "text", **options}
    own = EnvironmentSettings(function="plaudit.adapters.openenv:Client", options=options, timeout=30.0)
    players = [Player(Scripted(table.tokenizer, texts), table.chats, World(own)) for texts in said]
    plan = [Sampling(seed=5, max_tokens=20)]

    async def played() -> list[Completion]:
        found = await asyncio.gather(*(player.play(table.prompt, plan) for player in players))
        return [answer for (answer,) in found]

    return asyncio.run(played())


def closed(count: int) -> list[int]:
    """Wait until the server has closed this many sessions; return their sums."""
    until = time.monotonic() + 30
    while len(Adder.ended) < count and time.monotonic() < until:
        time.sleep(0.01)
    return sorted(Adder.ended)


def contents(answer: Completion) -> list[Any]:
    return [message["content"] for message in of(answer).messages]


def test_two_sessions_at_once_do_not_disturb_each_other(table: Table, url: str) -> None:
    one, two = episodes(table, ["3", "4", "5"], ["8", "1", "6"], url=url)
    first = f"{table.asked[0]['content']}\nMake ten (5)."
    assert contents(one) == [first, "3", "It is 3.", "4", "It is 7.", "5"]
    assert contents(two) == [first, "8", "It is 8.", "1", "It is 9.", "6"]
    assert of(one).earned.value == pytest.approx(1.2) and of(two).earned.value == pytest.approx(1.5)  # type: ignore
    assert [reward for _, reward in of(two).earned.process] == pytest.approx([0.8, 0.1])  # type: ignore[union-attr]
    assert closed(2) == [12, 15], "so there is room for others"


def test_a_refused_action_is_said_and_the_whole_observation_is_json(table: Table, url: str) -> None:
    (answer,) = episodes(table, ["three", "3", "7"], url=url, observation=None)
    _, _, refused, _, whole, _ = contents(answer)
    assert refused.startswith("error: ") and "VALIDATION_ERROR" in refused
    assert whole == '{"text": "It is 3.", "total": 3}', "without metadata, which may hold the goal"
    assert of(answer).earned.value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "said", "reason"),
    [
        ({}, ["1", "13"], "thirteen"),
        ({"action": "words"}, [], "takes actions of the fields metadata, number, not words only"),
        ({"observation": "words"}, [], "there is no words in the observation"),
        ({"url": "http://127.0.0.1:9"}, [], "ConnectError"),
    ],
)
def test_what_goes_wrong_fails_the_episode(
    options: dict[str, str], said: list[str], reason: str, table: Table, url: str
) -> None:
    (answer,) = episodes(table, said, **{"url": url, **options})
    failure = of(answer).failure
    assert failure is not None and reason in str(failure.reason)
    if "number" in options.get("action", "number") and "url" not in options:
        assert closed(1) == [len(said) // 2], "what failed ends its session"


def test_a_session_that_broke_is_not_gone_on_with(url: str) -> None:
    from plaudit.adapters.openenv import Client

    async def broken() -> None:
        client = Client(url, action="number", observation="text")
        await client.reset(seed=1)
        await client._client._ws.close()
        with pytest.raises(ConnectionError, match="broke off"):
            await client.step({"content": "3"})

    Adder.together = threading.Barrier(1)
    asyncio.run(broken())
