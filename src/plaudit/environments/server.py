"""OpenAI's chat protocol over HTTP, as a Starlette application: `POST /v1/chat/completions` and `GET /v1/models`.

    bytes -> known Host, no web page, the api key -> ChatRequest -> Speech -> JSON, or server-sent events

Left out: the model (`speaker.py`) and the sockets (`commands/listening.py`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from plaudit.environments import protocol
from plaudit.environments.protocol import ChatRequest, RequestError
from plaudit.environments.speaker import Speech
from plaudit.support.requests import HEADERS, guarded, json_of
from plaudit.types import Completion

AWAY_SECONDS = 0.5
"""Seconds between two looks whether a client still waits for its answer."""
NO_EPISODE = "this api key is of no episode, or of one that has ended"
DRAWN = ("temperature", "top_p", "top_k", "min_tokens", "special_tokens")
"""Fields of how an answer is drawn, beside its seed and its end."""


class Speaks(Protocol):
    """What answers requests. `key` is the request's api key."""

    def speech(self, request: ChatRequest, key: str) -> Speech: ...


def application(
    speaker: Speaks,
    *,
    model: str,
    names: Iterable[str],
    most: int,
    token: str | None = None,
    knows: Callable[[str], bool] | None = None,
) -> ASGIApp:
    """Return the application. `model` is the only model's name, `most` the limit of tokens of an answer to a request
    that sets none, and `names` are this server's host names. Clients must send `token` as their api key. With `knows`
    they are agents: a request is read if its key is known, it may name any model, and its fields DRAWN are ignored."""
    service = _Service(speaker, model, most, knows)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
    ]
    return guarded(routes, names, said=_said, token=token)


class _Service:
    """Handles the two routes."""

    def __init__(self, speaker: Speaks, model: str, most: int, knows: Callable[[str], bool] | None):
        self.speaker, self.model, self.most, self.knows = speaker, model, most, knows
        self.about = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "plaudit"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.about]}, headers=HEADERS)

    async def chat(self, request: Request) -> Response:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.knows is not None and not self.knows(key):
            return _said(401, NO_EPISODE)
        try:
            body = await json_of(request)
            if self.knows and isinstance(body, dict):
                body = {name: value for name, value in body.items() if name not in DRAWN}
            asked = protocol.read(body, most=self.most)
            if not self.knows and asked.model and asked.model.rpartition("/")[2] != self.model:
                reason = f"there is no model {asked.model!r:.80}: this server has {self.model!r}"
                raise RequestError(reason, "model", status=404, code="model_not_found")
            speech = self.speaker.speech(asked, key)
            if asked.stream:
                return StreamingResponse(self._events(speech), media_type="text/event-stream", headers=HEADERS)
            completions = await _unless_gone(request, speech)
        except RequestError as error:
            return JSONResponse(error.body, error.status, headers=HEADERS)
        except RecursionError:
            return JSONResponse(protocol.error_body("the request is nested too deeply", 400), 400, headers=HEADERS)
        reply = self._reply("chat.completion")
        reply["choices"] = [speech.choice(index, one) for index, one in enumerate(completions)]
        return JSONResponse(reply | {"usage": protocol.usage(speech.prompt_tokens, completions)}, headers=HEADERS)

    async def _events(self, speech: Speech) -> AsyncIterator[str]:
        """Yield the answers as server-sent events. Cancelled if the client goes away."""
        head, completions = self._reply("chat.completion.chunk"), list[Completion]()
        try:
            async for piece in speech.pieces(completions):
                yield _event({**head, "choices": [piece]})
            if speech.request.stream_options.get("include_usage"):
                yield _event({**head, "choices": [], "usage": protocol.usage(speech.prompt_tokens, completions)})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises; the status is sent already
            yield _event(protocol.error_body(_reason(error), 500))

    def _reply(self, kind: str) -> dict[str, Any]:
        key = f"chatcmpl-{secrets.token_hex(12)}"
        return {"id": key, "object": kind, "created": int(time.time()), "model": self.model}


async def _unless_gone(request: Request, speech: Speech) -> list[Completion]:
    """Return the answers. If the client goes away first, give them up."""
    answers = asyncio.ensure_future(speech.completions())
    try:
        while not (await asyncio.wait({answers}, timeout=AWAY_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(400, "the client went away")
    finally:
        answers.cancel()
    try:
        return answers.result()
    except RequestError:
        raise
    except Exception as error:
        raise HTTPException(500, _reason(error)) from error


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _said(status: int, reason: str) -> Response:
    """Return an error's response. It ends the connection, since part of the request may be unread."""
    asked = {"www-authenticate": "Bearer"} if status == 401 else {}
    body = protocol.error_body(reason, status, code="invalid_api_key" if status == 401 else None)
    return JSONResponse(body, status, headers=HEADERS | asked | {"connection": "close"})
