"""Reward servers that fail in every way we know of. None of them may ever lead to a number that no server gave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from told import says
from waiting import eventually

from plaudit.rewards import remote
from plaudit.rewards.protocol import REASON_LENGTH
from plaudit.rewards.remote import HttpReward, RewardServerError, _Server, check_servers
from plaudit.rewards.settings import RewardSettings
from plaudit.support.fields import complaints
from plaudit.types import Completion, Finish, Prompt, Score

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ROOT = Path(__file__).parents[2]
PROMPT = Prompt(id="p", text="p", tokens=(1,))


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_REST", 0.005)
    monkeypatch.setattr(remote, "LONGEST_REST", 0.02)


def completion(text: str) -> Completion:
    return Completion(tokens=(2,), logprobs=(0.0,), versions=(0,), text=text, finish=Finish.EOS)


def http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def lengths(items: list[Any]) -> bytes:
    """The honest score: the completion's length, and a half."""
    return json.dumps({"scores": [len(item["completion"]) + 0.5 for item in items]}).encode()


class FakeServer:
    """Answers by `behaviour(items) -> bytes to send`; None closes the connection without a word."""

    def __init__(self, behaviour: Callable[[list[Any]], Any] | None = None):
        self.behaviour = behaviour or (lambda items: http("200 OK", lengths(items)))
        self.requests: list[Any] = []
        self.heads: list[str] = []
        self.url = ""
        self.at_once = self.most_at_once = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
                body = json.loads(await reader.readexactly(int(size[0].split(":")[1]))) if size else {"items": []}
                self.heads.append(head)
                self.requests.append(body)
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    reply = self.behaviour(body["items"])
                    if isinstance(reply, Awaitable):
                        reply = await reply
                finally:
                    self.at_once -= 1
                if reply is None:
                    break
                for part in reply if isinstance(reply, list) else [reply]:
                    writer.write(part)
                    await writer.drain()
                    if isinstance(reply, list):
                        await asyncio.sleep(0.05)
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()


def settings(*urls: str, **more: Any) -> RewardSettings:
    return RewardSettings(kind="http", urls=list(urls), **({"retries": 2, "timeout": 5.0} | more))


async def slow(items: list[Any]) -> bytes:
    await asyncio.sleep(0.5)
    return http("200 OK", lengths(items))


async def never(items: list[Any]) -> None:
    await asyncio.sleep(60.0)


MODES: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "hangs up": (lambda items: None, "RemoteProtocolError"),
    "slow": (never, "no answer within 0.5 s"),
    "trickles": (lambda items: [b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 600], "no answer within 0.5 s"),
    "500": (lambda items: http("500 Oops", b"stack trace"), "status 500: stack trace"),
    "503 page": (lambda items: http("503 Busy", b"<html>busy</html>"), "status 503: <html>busy</html>"),
    "401": (lambda items: http("401 No", b"token?"), r"status 401: token\? \(1 attempt\)"),
    "redirect": (lambda items: http("307 There", b"", "location: http://127.0.0.1:1/score"), "status 307"),
    "garbage": (lambda items: http("200 OK", b"\x00\xff garbage"), "no JSON"),
    "no HTTP": (lambda items: b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "ProtocolError"),
    "not an object": (lambda items: http("200 OK", b"[1, 1]"), "but list"),
    "one too few": (lambda items: http("200 OK", lengths(items[1:])), "2 items were sent, and 1 scores came back"),
    "one too many": (lambda items: http("200 OK", lengths([*items, items[0]])), "and 3 scores came back"),
    "NaN": (lambda items: http("200 OK", b'{"scores": [NaN, Infinity]}'), "the server's score is (nan|inf)"),
    "text": (lambda items: http("200 OK", b'{"scores": ["1", true]}'), "a (str|bool)"),
    "null": (lambda items: http("200 OK", b'{"scores": [null, null], "reasons": ["odd", "odd"]}'), "server: odd"),
    "cut off": (lambda items: [http("200 OK", lengths(items))[:-4], *[b""] * 600], "no answer within 0.5 s"),
    "huge": (lambda items: http("200 OK", b" " * (5 << 20)), "more than 4 MiB"),
    "zipped": (lambda items: http("200 OK", gzip.compress(b" " * 9999), "content-encoding: gzip"), "compressed"),
    "endless head": (lambda items: b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 99_999, "ProtocolError"),
}


PATIENCE = {mode: 0.5 if "no answer" in said else 30.0 for mode, (_, said) in MODES.items()}
"""Seconds: those who answer may take long on a busy machine."""
LASTING = ("NaN", "text", "null", "401", "redirect", "huge", "zipped")
"""Answers that a server would give again: no outage."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_failure_becomes_a_number(mode: str) -> None:
    behaviour, said = MODES[mode]

    async def run() -> list[Score]:
        async with FakeServer(behaviour).running() as server:
            reward = HttpReward(settings(server.url, timeout=PATIENCE[mode]))
            return await reward.score(PROMPT, [completion("a"), completion("b")])

    scores = asyncio.run(run())
    assert [score.value for score in scores] == [None, None]
    assert {score.transient for score in scores} == {mode not in LASTING}
    for score in scores:
        assert score.reason is not None
        assert re.search(said, score.reason), score.reason


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in LASTING])
def test_a_server_that_recovers_is_asked_again(mode: str) -> None:
    behaviour, _ = MODES[mode]
    calls = Counter[str]()

    def first_fails(items: list[Any]) -> Any:
        calls["all"] += 1
        return behaviour(items) if calls["all"] <= 2 else http("200 OK", lengths(items))

    async def run() -> list[Score]:
        async with FakeServer(first_fails).running() as server:
            reward = HttpReward(settings(server.url, timeout=PATIENCE[mode]))
            return await reward.score(PROMPT, [completion("a"), completion("bb")])

    assert [score.value for score in asyncio.run(run())] == [1.5, 2.5]
    assert calls["all"] == 3


def test_nobody_there_is_a_reason_too() -> None:
    (score,) = asyncio.run(HttpReward(settings("http://127.0.0.1:1")).score(PROMPT, [completion("a")]))
    assert score.value is None
    assert score.reason is not None
    assert "http://127.0.0.1:1: ConnectError" in score.reason
    assert "(3 attempts)" in score.reason


def test_only_the_first_wait_long_for_a_server_that_is_gone() -> None:
    async def run() -> list[str | None]:
        reward = HttpReward(settings("http://127.0.0.1:1", retries=6))
        return [(await reward.score(PROMPT, [completion("a")]))[0].reason for _ in range(3)]

    reasons = asyncio.run(run())
    assert [str(reason).rpartition("(")[2] for reason in reasons] == ["7 attempts)", "1 attempt)", "1 attempt)"]


def test_one_odd_score_takes_no_other_with_it() -> None:
    async def run() -> list[Score]:
        async with FakeServer(lambda items: http("200 OK", b'{"scores": [1, NaN, 3]}')).running() as server:
            return await HttpReward(settings(server.url)).score(PROMPT, [completion(text) for text in "abc"])

    assert [score.value for score in asyncio.run(run())] == [1.0, None, 3.0]


def test_groups_that_ask_together_share_requests() -> None:
    async def run() -> FakeServer:
        async with FakeServer().running() as server:
            reward = HttpReward(settings(server.url, batch=4, concurrency=2))
            groups = [[completion("x" * (3 * g + k)) for k in range(3)] for g in range(5)]
            found = await asyncio.gather(*(reward.score(PROMPT, group) for group in groups))
            assert [[s.value for s in scores] for scores in found] == [
                [3 * g + k + 0.5 for k in range(3)] for g in range(5)
            ]
            await eventually(lambda: not any("_send" in repr(task) for task in asyncio.all_tasks()), "no sender")
        return server

    server = asyncio.run(run())
    assert [len(request["items"]) for request in server.requests] == [4, 4, 4, 3]
    assert server.most_at_once <= 2


def test_the_least_busy_server_is_asked() -> None:
    """One of the two is busy until the other has answered all the rest."""

    async def until_all_others(items: list[Any]) -> bytes:
        while len(free.requests) < 19:
            await asyncio.sleep(0.01)
        return http("200 OK", lengths(items))

    free = FakeServer()

    async def run() -> list[int]:
        async with FakeServer(until_all_others).running() as busy, free.running():
            reward = HttpReward(settings(busy.url, free.url, batch=1, concurrency=2))
            scores = await reward.score(PROMPT, [completion("a")] * 20)
            assert [score.value for score in scores] == [1.5] * 20
            return [len(busy.requests), len(free.requests)]

    assert asyncio.run(run()) == [1, 19]


def test_equally_busy_servers_are_asked_in_turn() -> None:
    async def run() -> list[int]:
        async with FakeServer().running() as one, FakeServer().running() as other:
            reward = HttpReward(settings(one.url, other.url, batch=1, concurrency=1))
            await reward.score(PROMPT, [completion("a")] * 10)
            return [len(one.requests), len(other.requests)]

    assert asyncio.run(run()) == [5, 5]


def test_rests_double_up_to_the_longest_and_end_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_REST", 0.5)
    monkeypatch.setattr(remote, "LONGEST_REST", 15.0)
    server, now, rests = _Server("http://here"), 100.0, list[float]()
    for _ in range(7):
        server.failed(now, now)
        rests.append(server.rest_ends - now)
        server.failed(now - 1.0, now)  # under way when the rest began: tells nothing new
        assert server.rest_ends - now == rests[-1]
        now = server.rest_ends
    for rest, most in zip(rests, [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0], strict=True):
        assert most / 2 <= rest <= most
    server.worked()
    assert (server.failures, server.rest_ends) == (0, 0.0)


def test_one_that_is_cancelled_under_way_takes_no_other_with_it() -> None:
    """Its score comes too late for it; the one beside it in the request would have waited for ever."""

    async def run() -> Score:
        async with FakeServer(slow).running() as server:
            reward = HttpReward(settings(server.url, batch=2, concurrency=1))
            given_up, waiting = (asyncio.ensure_future(reward.score(PROMPT, [completion("a")])) for _ in range(2))
            while not server.requests:
                await asyncio.sleep(0.01)
            assert len(server.requests[0]["items"]) == 2
            given_up.cancel()
            return (await asyncio.wait_for(waiting, 10))[0]

    assert asyncio.run(run()).value == 1.5


def test_what_cannot_be_asked_is_told_to_those_who_wait() -> None:
    async def run() -> None:
        reward = HttpReward(settings("http://127.0.0.1:1", options={("a", "b"): 1}))
        assert reward.name == "http"
        await asyncio.wait_for(reward.score(PROMPT, [completion("a")]), 10)

    with pytest.raises(TypeError, match="keys must be str"):
        asyncio.run(run())


def test_a_reason_is_no_page() -> None:
    async def run() -> Score:
        async with FakeServer(lambda items: http("404 None", b"x" * 10_000)).running() as server:
            return (await HttpReward(settings(server.url)).score(PROMPT, [completion("a")]))[0]

    reason = asyncio.run(run()).reason
    assert reason is not None and 0 < reason.count("x") <= REASON_LENGTH


def test_certificates_are_checked() -> None:
    context = HttpReward(settings("http://one", "https://two"))._verify
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert HttpReward(settings("http://one"))._verify is False  # there are none, and reading ours takes time


def test_a_server_that_fails_rests_and_others_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short rests it would be asked again as often as this machine is slow."""
    monkeypatch.setattr(remote, "FIRST_REST", 60.0)
    monkeypatch.setattr(remote, "LONGEST_REST", 60.0)

    async def run() -> tuple[int, int]:
        broken = FakeServer(lambda items: http("500 Oops", b""))
        async with broken.running(), FakeServer().running() as whole:
            reward = HttpReward(settings(broken.url, whole.url, batch=1, concurrency=1, retries=8))
            scores = await reward.score(PROMPT, [completion("a")] * 50)
            assert [score.value for score in scores] == [1.5] * 50
            return len(broken.requests), len(whole.requests)

    broken, whole = asyncio.run(run())
    assert (broken, whole) == (1, 50)


def test_a_refusal_is_not_repeated_but_others_are_asked() -> None:
    async def run() -> tuple[list[Score], int]:
        refusing = FakeServer(lambda items: http("404 None", b""))
        async with refusing.running(), FakeServer().running() as whole:
            scores = await HttpReward(settings(refusing.url, whole.url)).score(PROMPT, [completion("a")])
            return scores, len(refusing.requests)

    scores, refused = asyncio.run(run())
    assert [score.value for score in scores] == [1.5]
    assert refused == 1


@pytest.mark.parametrize("servers", [1, 2])
def test_an_item_that_is_refused_takes_no_other_with_it(servers: int) -> None:
    """And says nothing about the server, which does not rest for it."""

    def strict(items: list[Any]) -> bytes:
        if any(item["completion"] == "bad" for item in items):
            return http("422 Odd", b"bad item")
        return http("200 OK", lengths(items))

    async def run() -> tuple[list[Score], HttpReward]:
        async with FakeServer(strict).running() as one, FakeServer(strict).running() as other:
            reward = HttpReward(settings(*[one.url, other.url][:servers]))
            return await reward.score(PROMPT, [completion(text) for text in (*"abcde", "bad", *"fghij")]), reward

    scores, reward = asyncio.run(run())
    assert [score.value for score in scores] == [1.5] * 5 + [None] + [1.5] * 5
    assert re.search("status 422: bad item", str(scores[5].reason))
    assert [server.failures for server in reward.servers] == [0] * servers


def test_what_is_asked_while_the_last_connections_close_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        closing, client = asyncio.Event(), remote.client_of

        @contextlib.asynccontextmanager
        async def lingering(*arguments: Any) -> AsyncIterator[Any]:
            async with client(*arguments) as opened:
                yield opened
            closing.set()
            await asyncio.sleep(0.05)

        monkeypatch.setattr(remote, "client_of", lingering)
        async with FakeServer().running() as server:
            reward = HttpReward(settings(server.url, concurrency=1))
            assert [score.value for score in await reward.score(PROMPT, [completion("a")])] == [1.5]
            await closing.wait()
            late = await asyncio.wait_for(reward.score(PROMPT, [completion("ab")]), 5)
            assert [score.value for score in late] == [2.5]

    asyncio.run(run())


def test_the_token_goes_in_the_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")

    async def run() -> FakeServer:
        async with FakeServer(lambda items: http("403 No", b"no")).running() as server:
            (score,) = await HttpReward(settings(server.url, token_env="JUDGE_TOKEN")).score(PROMPT, [completion("a")])
            assert "s3cret" not in str(score)
        return server

    server = asyncio.run(run())
    assert "authorization: bearer s3cret" in server.heads[0].lower()
    assert "s3cret" not in str(server.requests)


@pytest.mark.parametrize("value", ["", "  ", "a\nb"])
def test_a_token_that_is_none_is_said_at_the_start(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", value)
    with pytest.raises(RewardServerError, match="JUDGE_TOKEN"):
        asyncio.run(check_servers(settings("http://127.0.0.1:1", token_env="JUDGE_TOKEN")))


def test_servers_are_asked_whether_they_are_there() -> None:
    async def run() -> None:
        with pytest.raises(RewardServerError, match=r"'http'.*ConnectError.*plaudit serve-reward"):
            await check_servers(settings("http://127.0.0.1:1"))
        async with FakeServer(lambda items: http("401 No", b"")).running() as closed:
            with pytest.raises(RewardServerError, match="token_env"):
                await check_servers(settings(closed.url))
            async with FakeServer(lambda items: http("404 None", b"")).running() as other:
                (problem,) = await check_servers(settings(closed.url, other.url))
                assert "token_env" in problem
                assert await check_servers(settings(other.url)) == []
            async with FakeServer(lambda items: http("500 Oops", b"")).running() as broken:
                with pytest.raises(RewardServerError, match=r"'best'.*/health: status 500"):
                    await check_servers(settings(broken.url, name="best"))
            async with FakeServer(slow).running() as late:
                with pytest.raises(RewardServerError, match=r"/health: .*0\.2 s"):
                    await check_servers(settings(late.url, timeout=0.2))

    asyncio.run(run())


def test_a_cancelled_request_is_not_sent() -> None:
    async def run() -> list[list[str]]:
        async with FakeServer().running() as server:
            reward = HttpReward(settings(server.url))
            gone = asyncio.create_task(reward.score(PROMPT, [completion("gone")]))
            stays = asyncio.create_task(reward.score(PROMPT, [completion("stays")]))
            await asyncio.sleep(0)
            gone.cancel()
            assert [score.value for score in await stays] == [5.5]
            return [[item["completion"] for item in request["items"]] for request in server.requests]

    assert asyncio.run(run()) == [["stays"]]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"urls": []}, "urls=[] "),
        ({"urls": ["localhost:8008"]}, "not the address"),
        ({"urls": ["http://"]}, "not the address"),
        ({"urls": ["http://h:99999"]}, "not the address"),
        ({"urls": ["http://h\r\nx: y"]}, "not the address"),
        ({"urls": ["http://me:secret@h"]}, "h .. password"),
        ({"urls": ["http://h/?a=b"]}, "must end before"),
        ({"timeout": 0.0}, "timeout=0.0 "),
        ({"retries": -1}, "retries=-1"),
        ({"batch": 0}, "batch=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"path": "judge"}, "path .. 'judge' only"),
        ({"kind": "gsm8k"}, "urls"),
    ],
)
def test_settings_that_cannot_work_are_refused(more: dict[str, Any], said: str) -> None:
    assert says("\n".join(complaints(RewardSettings(**({"kind": "http", "urls": ["http://h:1"]} | more)))), said)


def test_the_example_is_what_the_page_prints_and_speaks_the_protocol() -> None:
    path = ROOT / "examples" / "serving" / "my_server.py"
    assert f"```python\n{path.read_text(encoding='utf-8')}```" in (ROOT / "docs" / "rewards.md").read_text(
        encoding="utf-8"
    )
    command = [sys.executable, str(path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            given = settings(process.stdout.readline().split()[-1])
            assert asyncio.run(check_servers(given)) == []
            scores = asyncio.run(HttpReward(given).score(PROMPT, [completion("a b a b"), completion("")]))
        finally:
            process.kill()
    assert [score.value for score in scores] == [0.5, None]
    assert scores[1].reason == "not scored by the server: an empty answer"
