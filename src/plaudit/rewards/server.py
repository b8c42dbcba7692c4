"""The server's side of the reward protocol, as a Starlette application: `POST /score` and `GET /health`.

    bytes -> known Host, no web page, the token -> RewardItems -> `scores` -> answer

Left out: the model (`scores` turns items into Scores) and the sockets, which `commands/serve.py` opens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from plaudit.rewards import protocol
from plaudit.rewards.protocol import RewardItem
from plaudit.support.requests import HEADERS, MAX_BODY, body_of, guarded
from plaudit.types import Score

Scores = Callable[[Sequence[RewardItem]], Awaitable[list[Score]]]


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
    routes = [
        Route("/score", service.score, methods=["POST"]),
        Route("/health", service.health, methods=["GET"]),
    ]
    return guarded(routes, names, said=_said, token=token, max_body=max_body)


class _Service:
    """Handles the two routes, `POST /score` and `GET /health`."""

    def __init__(self, scores: Scores, about: Mapping[str, Any]):
        self.scores, self.about, self.scored = scores, dict(about), 0

    async def health(self, request: Request) -> Response:
        found = {"status": "ok", "version": protocol.VERSION, **self.about, "scored": self.scored}
        return JSONResponse(found, headers=HEADERS)

    async def score(self, request: Request) -> Response:
        body = await body_of(request)
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


def _said(status: int, reason: str) -> Response:
    """Return a JSON response with the reason. It ends the connection, since part of the request may be unread."""
    asked = {"www-authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": reason}, status, headers=HEADERS | asked | {"connection": "close"})
