"""Connections that send half a request, or read nothing, keep no other address out of the page or the reward server."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("only Linux has all of 127.0.0.0/8", allow_module_level=True)

import uvicorn

from plaudit.commands import listening
from plaudit.commands.listening import bounded_protocol, listen, peer_of, serve_http
from plaudit.page.app import application as page_application
from plaudit.rewards.server import application as reward_application
from plaudit.support import requests
from plaudit.types import Score

pytestmark = pytest.mark.slow

BODY = b'{"version": 1, "items": [{"prompt": "a", "completion": "b"}]}'
HEAD = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
    BODY
)
LOOK = b"GET /api/runs HTTP/1.1\r\nhost: localhost\r\n"
HALVES = (b"", b"P", LOOK[:30], LOOK, LOOK + b"content-length: 9\r\n\r\n", HEAD, HEAD + BODY[:9])
Opened = Callable[..., socket.socket]


async def scored(questions: Any) -> list[Score]:
    return [Score(value=1.0) for _ in questions]


def page(folder: Path) -> Any:
    return page_application(folder)


def rewards(folder: Path) -> Any:
    return reward_application(scored, about={}, names=("localhost",))


@pytest.fixture(params=[page, rewards])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Called with an address of this machine: a connection from there to a server with few places."""
    monkeypatch.setattr(listening, "OF_ALL", 24)
    monkeypatch.setattr(listening, "OF_ONE_PEER", 12)
    monkeypatch.setattr(listening, "HEADER_SECONDS", 600.0)  # no place is free because of time
    monkeypatch.setattr(requests, "BODY_SECONDS", 600.0)
    servers: list[Any] = []
    run = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **more: (servers.append(self), run(self, **more)))
    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as opened:
        place = listener.getsockname()
        thread = threading.Thread(target=serve_http, args=(request.param(tmp_path), bounded_protocol(), listener))
        thread.start()

        def connect(address: str, sent: bytes = b"") -> socket.socket:
            one = opened.enter_context(socket.create_connection(place, timeout=60, source_address=(address, 0)))
            with contextlib.suppress(OSError):  # it may have been closed already
                one.sendall(sent)
            return one

        yield connect
        servers[0].should_exit = servers[0].force_exit = True
        thread.join()


def ended(connection: socket.socket) -> bool:
    """True once the server has closed it; what came before is read."""
    connection.settimeout(0)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def answered(connect: Opened, address: str) -> bytes:
    """The answer, once what was asked before is answered: whole requests, unlike halves, come to an end."""
    until, reply = time.monotonic() + 60, b"HTTP/1.1 503"
    while reply.startswith(b"HTTP/1.1 503") and time.monotonic() < until:
        with connect(address, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") as one:
            reply = one.recv(1000)
    return reply


def served_well(reply: bytes) -> bool:
    """True for an answer of the application: the page has no /health."""
    return reply.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))


@pytest.mark.parametrize("half", HALVES)
def test_halves_of_requests_from_several_addresses_keep_nobody_out(served: Opened, half: bytes) -> None:
    held = [served(f"127.0.0.{number % 3 + 2}", half) for number in range(120)]
    for _ in range(3):
        assert served_well(answered(served, "127.0.0.1"))
    assert sum(not ended(one) for one in held) < 24


@pytest.mark.parametrize("tick", [1e-9, 0.5])
def test_an_address_has_only_its_share(tick: float, monkeypatch: pytest.MonkeyPatch, served: Opened) -> None:
    """Whatever the steps of the loop's clock are: uvloop's are milliseconds."""
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda self: time.monotonic() // tick * tick)
    held = [served("127.0.0.2", LOOK) for _ in range(60)]
    assert served_well(answered(served, "127.0.0.1"))
    assert [at for at, one in enumerate(held) if not ended(one)] == list(range(48, 60)), "the oldest go"


def test_who_opens_one_connection_keeps_it_while_others_take_all_they_can(served: Opened) -> None:
    mine = served("127.0.0.1", LOOK)
    for number in range(120):
        served(f"127.0.0.{number % 2 + 2}", LOOK)
    mine.sendall(b"\r\n")
    assert mine.recv(1000).startswith(b"HTTP/1.1")


@pytest.mark.parametrize("half", [b"", LOOK[:30], LOOK])
def test_a_head_has_a_deadline(served: Opened, half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.2)
    one = served("127.0.0.1", half)
    assert select.select([one], [], [], 60)[0], "it is closed, sooner or later"
    assert ended(one)


def test_an_answer_that_nobody_reads_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "READ_SECONDS", 0.2)
    sent = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
                if (await asyncio.wait([asyncio.ensure_future(receive())], timeout=0))[0]:
                    break
        finally:
            sent.set()

    servers: list[Any] = []
    run = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **more: (servers.append(self), run(self, **more)))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=serve_http, args=(endless, bounded_protocol(), listener))
        thread.start()
        with socket.create_connection(listener.getsockname()) as one:
            one.sendall(LOOK + b"\r\n")
            assert sent.wait(60), "its place is free again"
        servers[0].should_exit = servers[0].force_exit = True
        thread.join()


def test_a_network_of_ipv6_is_one_peer() -> None:
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:2") != peer_of("2001:db8:0:1::1")
    assert peer_of("fe80::1%eth0") == "fe80::/64"
    assert peer_of("10.0.0.1") != peer_of("10.0.0.2")
