"""The server's side of the reward protocol, as an ASGI application: `POST /score` and `GET /health`.

    bytes -> Guard -> RewardItems -> `scores` -> answer

Two routes need no framework. Left out: the model (`scores` turns items into Scores) and the sockets, which
`commands/serve.py` opens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.rewards import protocol
from plaudit.rewards.protocol import RewardItem
from plaudit.support.requests import by_name, has_token, known_host
from plaudit.types import Score

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scores = Callable[[Sequence[RewardItem]], Awaitable[list[Score]]]

BODY_SECONDS = 30.0
"""Seconds that a client has to send its request."""


class Refused(Exception):
    """A request is not served: the reason and the HTTP status."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Decides which requests are served. Those of web pages are not: they have an Origin or, after DNS rebinding, a
    Host that is not ours. `hosts` are our names; every IP address counts as ours."""

    token: str | None = None
    hosts: frozenset[str] = frozenset({"localhost"})

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise Refused unless the request may be served. Every route is checked."""
        given = by_name(headers)
        if "origin" in given:
            raise Refused(403, "pages in browsers are not served: the request has an Origin")
        hosts = given.get("host", [])
        if not known_host(given, self.hosts):
            raise Refused(
                403, f"unknown Host {', '.join(hosts)!r:.80}: start the server with --allow-host for this name"
            )
        if self.token is not None and not has_token(given, self.token):
            raise Refused(401, "the token is missing or wrong: send 'Authorization: Bearer TOKEN'")


class RewardApplication:
    """The ASGI application. `about` is the content of /health. A request's tokens are used if the digest of their
    vocabulary equals `about["vocabulary"]`; otherwise its texts are used."""

    def __init__(self, scores: Scores, guard: Guard, *, about: Mapping[str, Any], max_body: int = 16 << 20):
        self.scores, self.guard, self.about, self.max_body = scores, guard, dict(about), max_body
        self.scored = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self.guard.check(scope["headers"])
            status, body = 200, await self._reply(scope, receive)
        except Refused as refused:
            status, body = refused.status, _said(str(refused))
        except Exception as error:  # noqa: BLE001 - whatever scoring raises is this request's failure, not the server's
            status, body = 500, _said(f"{type(error).__name__}: {error!s:.200}")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status != 200:  # part of the request may be unread
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _reply(self, scope: Scope, receive: Receive) -> bytes:
        methods = {"/score": "POST", "/health": "GET"}
        if scope["path"] not in methods:
            raise Refused(404, "there are only /score and /health")
        if scope["method"] != methods[scope["path"]]:
            raise Refused(405, f"{scope['path']} takes {methods[scope['path']]}")
        if scope["path"] == "/health":
            return json.dumps(
                {"status": "ok", "version": protocol.VERSION, **self.about, "scored": self.scored}
            ).encode()
        headers = dict(scope["headers"])
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise Refused(415, "send application/json")
        body = await self._body(headers, receive)
        try:
            questions = protocol.read_request(body, vocabulary=str(self.about.get("vocabulary", "")))
        except protocol.ProtocolError as error:
            raise Refused(400, str(error)) from None
        scores = await self.scores(questions)
        self.scored += len(scores)
        return protocol.answer(scores)

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        size = headers.get(b"content-length", b"0")
        too_large = Refused(413, f"the request has more than {self.max_body} bytes: send fewer items")
        if not size.isdigit() or len(size) > 20 or int(size) > self.max_body:  # Python reads 4,300 digits at most
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the client went away")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.max_body:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"the request was not sent within {BODY_SECONDS:g} s") from None
        return bytes(body)


def _said(reason: str) -> bytes:
    return json.dumps({"error": reason}).encode()
