"""Restrict who may send requests to our HTTP servers: by the Host header, and by a token.

    request -> known_hosts -> the application, where has_token asks for the token
    request -> guarded -> no web page, the token -> routes, which read JSON -> what they say of a refusal

Any web page that a person visits can send requests to this machine, also under a name that it rebinds to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Host, Router
from starlette.types import ASGIApp, Receive, Scope, Send

BODY_SECONDS = 30.0
"""Seconds that a client has to send its request."""
MAX_BODY = 16 << 20
"""Most bytes of a request's body."""
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
Said = Callable[[int, str], Response]
"""Makes the response to a refused request of its status and the reason."""


class _Address(Convertor[str]):
    """A Host that is an IP address, which no web page can rebind. Starlette itself checks addresses in brackets."""

    regex = r"\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]+\]"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("address", _Address())


def known_hosts(inside: ASGIApp, names: Iterable[str], *, refused: Response) -> ASGIApp:
    """Return an application that serves requests whose Host is one of `names` or an IP address, and refuses others."""
    hosts = ("{address:address}", *(name.lower() for name in names if ":" not in name))
    return Router([Host(host, inside) for host in hosts], redirect_slashes=False, default=refused)


def has_token(request: Request, token: str) -> bool:
    """True if the request has this token, as a bearer token or X-API-Key, and no other. The comparison takes constant
    time."""
    found = [*request.headers.getlist("authorization"), *(f"Bearer {x}" for x in request.headers.getlist("x-api-key"))]
    return len(found) == 1 and hmac.compare_digest(found[0].encode(), f"Bearer {token}".encode())


def guarded(
    routes: Sequence[BaseRoute],
    names: Iterable[str],
    *,
    said: Said,
    token: str | None = None,
    max_body: int = MAX_BODY,
) -> ASGIApp:
    """Return an application for clients that have the token (None: for all) and know one of this server's `names`."""

    def refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        large = error.status_code == 413
        return said(error.status_code, "the request is too large: send less at once" if large else error.detail)

    inside = Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, token=token, said=said)],
        exception_handlers={HTTPException: refusal},
        max_body_size=max_body,
    )
    return known_hosts(
        inside, names, refused=said(403, "unknown Host: start the server with --allow-host for this name")
    )


@dataclass(frozen=True)
class _Guard:
    """A middleware that refuses web pages, which send an Origin, and clients without the token. It sees every route."""

    app: ASGIApp
    token: str | None
    said: Said

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        answer: ASGIApp = self.app
        if "origin" in request.headers:
            answer = self.said(403, "pages in browsers are not served: the request has an Origin")
        elif self.token is not None and not has_token(request, self.token):
            answer = self.said(401, "the token is missing or wrong: send 'Authorization: Bearer TOKEN'")
        try:
            await answer(scope, receive, send)
        except asyncio.CancelledError:  # the server's event loop ends; uvicorn logs an error if it has no answer
            with contextlib.suppress(RuntimeError):  # the answer has begun
                return await self.said(503, "the server has stopped")(scope, receive, send)
            raise


async def body_of(request: Request, kind: str = "application/json") -> bytes:
    """Return a request's body of this media type. Raises HTTPException if it is none, or does not arrive in time."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != kind:
        raise HTTPException(415, f"send {kind}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the request was not sent within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None


async def json_of(request: Request) -> Any:
    """Return the value in a request's body. Raises HTTPException as `body_of`, and for a body that is no JSON."""
    try:
        return json.loads(await body_of(request))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error!s:.100}") from None
