"""Starlette middleware that decides which requests may read the page.

    request -> no foreign Origin, GET, the token for data -> the application, with strict headers

The token is in the address's fragment, which browsers never send; the page sends it in a header.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plaudit.support.requests import has_token

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
STRANGER = PlainTextResponse("unknown Host: give the server --allow-host for this name", 403, HEADERS)
"""The response to a request whose Host header is not one of the server's names."""


@dataclass(frozen=True)
class Door:
    """Passes only requests of our own page. `token`: what requests for data must have; None: no token is needed."""

    app: ASGIApp
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._refused(Request(scope)) or self.app)(scope, receive, with_headers)

    def _refused(self, request: Request) -> Response | None:
        """Return the response that refuses a request, with the reason; None if the request is allowed."""
        own = f"http://{request.headers['host']}"
        if any(origin != own for origin in request.headers.getlist("origin")):
            return PlainTextResponse("pages of others are not served: the request has another Origin", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the page only reads", 405)
        if not request.scope["path"].startswith("/api/"):
            return None
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return PlainTextResponse("pages of others are not served: the request comes from another site", 403)
        if self.token is not None and not has_token(request, self.token):
            reason = "the token is missing or wrong: open the address that the command printed"
            return PlainTextResponse(reason, 401, {"www-authenticate": "Bearer"})
        return None
