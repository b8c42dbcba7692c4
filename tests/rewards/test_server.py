"""The application without sockets: who may ask, and what becomes of requests that are none."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from plaudit.rewards.protocol import RewardItem
from plaudit.rewards.server import application as reward_application
from plaudit.types import Score

TOKEN = "0123456789abcdef"
ITEM = {"prompt": "a", "completion": "bcd"}


async def lengths(questions: Sequence[RewardItem]) -> list[Score]:
    if any(question.completion.text == "break" for question in questions):
        raise MemoryError("too much")
    return [Score(value=float(len(question.completion.text))) for question in questions]


def application(*names: str, token: str | None = None) -> Any:
    about = {"model": "m", "vocabulary": "v"}
    return reward_application(lengths, about=about, names=("localhost", *names), token=token, max_body=10_000)


def ask(app: Any, method: str, path: str, **more: Any) -> httpx2.Response:
    async def run() -> httpx2.Response:
        base = more.pop("base", "http://127.0.0.1:8008")
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=base) as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


def score(app: Any, *items: Any, **more: Any) -> httpx2.Response:
    return ask(app, "POST", "/score", json={"version": 1, "items": list(items)}, **more)


def test_scores_and_health() -> None:
    app = application()
    reply = score(app, ITEM, ITEM | {"completion": ""})
    assert (reply.status_code, reply.json()) == (200, {"version": 1, "scores": [3.0, 0.0], "reasons": [None, None]})
    assert ask(app, "GET", "/health").json() == {
        "status": "ok",
        "version": 1,
        "model": "m",
        "vocabulary": "v",
        "scored": 2,
    }


ROUTES = [("GET", "/health"), ("POST", "/score"), ("GET", "/"), ("DELETE", "/score"), ("POST", "/../etc/passwd")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_pages_and_strangers_are_refused_on_every_route(method: str, path: str, token: str | None) -> None:
    app = application("judge", token=token)
    right = {} if token is None else {"authorization": f"Bearer {token}"}
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8008", "", "judge:80:80", "[::1"):
        assert ask(app, method, path, headers=right | {"host": host}).status_code == 403, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8008"):
        assert ask(app, method, path, headers=right | {"origin": origin}).status_code == 403
    if token is None:
        return
    wrong = ("", "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", token, "Bearer é")
    for value in wrong:
        assert ask(app, method, path, headers={"authorization": value.encode()}).status_code == 401, value
    assert ask(app, method, path).status_code == 401


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8008", "localhost:9", "LOCALHOST", "[::1]:8008", "10.0.0.7:1"]
)
def test_addresses_and_known_names_are_served(host: str) -> None:
    assert score(application(), ITEM, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("status", "content", "headers"),
    [
        (400, b"{", {}),
        (400, b'{"version": 2, "items": [{}]}', {}),
        (400, b"[" * 9_000, {}),
        (413, b" " * 10_001, {}),
        (415, b"{}", {"content-type": "text/plain"}),
        (415, b"{}", {"content-type": ""}),
        (413, b"{}", {"content-length": "10001"}),
        (400, b"{}", {"content-length": "9" * 5000}),
    ],
)
def test_what_is_no_request_is_refused(status: int, content: bytes, headers: dict[str, str]) -> None:
    found = ask(
        application(), "POST", "/score", content=content, headers={"content-type": "application/json"} | headers
    )
    assert found.status_code == status
    assert found.text


def test_who_has_the_token_is_served_and_who_sends_two_is_not() -> None:
    app, right = application(token=TOKEN), ("authorization", f"Bearer {TOKEN}")
    for headers, status in (([right], 200), ([right, right], 401), ([], 401), ([right, ("origin", "null")], 403)):
        reply = score(app, ITEM, headers=headers)
        assert reply.status_code == status
        assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_a_type_may_have_spaces_and_a_charset() -> None:
    body = json.dumps({"version": 1, "items": [ITEM]}).encode()
    for kind, status in (("Application/JSON ; charset=utf-8", 200), ("application/jsonl", 415)):
        reply = ask(application(), "POST", "/score", content=body, headers={"content-type": kind})
        assert reply.status_code == status


def test_a_body_without_length_is_counted() -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    found = ask(application(), "POST", "/score", content=endless(), headers={"content-type": "application/json"})
    assert found.status_code == 413


def test_routes_and_methods_that_are_not_there() -> None:
    app = application()
    assert ask(app, "GET", "/nothing").status_code == 404
    assert ask(app, "GET", "/score").status_code == 405
    assert ask(app, "POST", "/health").status_code == 405


def test_a_failure_of_the_judge_is_a_status_and_the_server_goes_on() -> None:
    app = application()
    broken = score(app, ITEM | {"completion": "break"})
    assert (broken.status_code, broken.json()) == (500, {"error": "MemoryError: too much"})
    assert score(app, ITEM).status_code == 200


def test_damaged_requests_never_break_the_server() -> None:
    app = application()
    whole = json.dumps({"version": 1, "items": [ITEM, ITEM]}).encode()
    generator = random.Random(0)
    statuses = set()
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(generator.randint(1, 5)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        found = ask(app, "POST", "/score", content=bytes(body), headers={"content-type": "application/json"})
        statuses.add(found.status_code)
    assert statuses <= {200, 400}
