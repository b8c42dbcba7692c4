"""The server's side of the reward protocol, as a Starlette application: `POST /score` and `GET /health`.

    bytes -> known Host, no web page, the token -> RewardItems -> `scores` -> answer

Left out: the model (`scores` turns items into Scores) and the sockets, which `commands/serve.py` opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from plaudit.rewards import protocol
from plaudit.rewards.protocol import RewardItem
from plaudit.support.requests import has_token, known_hosts
from plaudit.types import Score

Scores = Callable[[Sequence[RewardItem]], Awaitable[list[Score]]]

BODY_SECONDS = 30.0
"""Seconds that a client has to send its request."""
MAX_BODY = 16 << 20
"""Most bytes of a request's body."""
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def application(
    scores: Scores,
    *,
    about: Mapping[str, Any],
    names: Iterable[str],
    token: str | None = None,
    max_body: int = MAX_BODY,
) -> ASGIApp:
    """Return the application. `about` is the content of /health. A request's tokens are used if the digest of their
    vocabulary equals `about["vocabulary"]`; otherwise its texts are used. `names` are this server's host names."""
    service = _Service(scores, about)
    inside = Starlette(
        routes=[
            Route("/score", service.score, methods=["POST"]),
            Route("/health", service.health, methods=["GET"]),
        ],
        middleware=[Middleware(_Guard, token=token)],
        exception_handlers={HTTPException: _refusal},
        max_body_size=max_body,
    )
    return known_hosts(
        inside, names, refused=_said(403, "unknown Host: start the server with --allow-host for this name")
    )


class _Service:
    """Handles the two routes, `POST /score` and `GET /health`."""

    def __init__(self, scores: Scores, about: Mapping[str, Any]):
        self.scores, self.about, self.scored = scores, dict(about), 0

    async def health(self, request: Request) -> Response:
        found = {"status": "ok", "version": protocol.VERSION, **self.about, "scored": self.scored}
        return JSONResponse(found, headers=HEADERS)

    async def score(self, request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "send application/json")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.body()
        except TimeoutError:
            raise HTTPException(408, f"the request was not sent within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client went away") from None
        try:
            questions = protocol.read_request(body, vocabulary=str(self.about.get("vocabulary", "")))
        except protocol.ProtocolError as error:
            raise HTTPException(400, str(error)) from None
        try:
            found = await self.scores(questions)
        except Exception as error:  # whatever scoring raises is this request's failure, not the server's
            raise HTTPException(500, f"{type(error).__name__}: {error!s:.200}") from error
        self.scored += len(found)
        return Response(protocol.answer(found), media_type="application/json", headers=HEADERS)


@dataclass(frozen=True)
class _Guard:
    """A middleware that refuses web pages, which send an Origin, and clients without the token. It sees every route."""

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        answer: ASGIApp = self.app
        if "origin" in request.headers:
            answer = _said(403, "pages in browsers are not served: the request has an Origin")
        elif self.token is not None and not has_token(request, self.token):
            answer = _said(401, "the token is missing or wrong: send 'Authorization: Bearer TOKEN'")
        await answer(scope, receive, send)


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = "the request is too large: send fewer items" if error.status_code == 413 else error.detail
    return _said(error.status_code, reason)


def _said(status: int, reason: str) -> Response:
    """Return a JSON response with the reason. It ends the connection, since part of the request may be unread."""
    asked = {"www-authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": reason}, status, headers=HEADERS | asked | {"connection": "close"})
