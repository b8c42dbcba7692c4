"""Who may read the page: an ASGI layer before the application.

    request -> a known Host, no foreign Origin, GET, the token for data -> the application, with strict headers

Any web page that a person visits can send requests to this machine, also under a name that it rebinds to 127.0.0.1. The
token is in the address's fragment, which browsers never send; the page sends it in a header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from plaudit.support.requests import by_name, has_token, known_host

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

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


@dataclass(frozen=True, kw_only=True)
class Door:
    """Lets only requests of our own page through. `names` are this server's; addresses always are. `token`: asked for
    data, if there is one."""

    inside: Application
    names: frozenset[str] = frozenset({"localhost"})
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self._refused(scope)
        if refused is not None:
            await _answer(send, *refused)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *ours]
            await send(message)

        await self.inside(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason for which a request is refused, or None."""
        given = by_name(scope["headers"])
        hosts = given.get("host", [])
        if not known_host(given, self.names):
            return 403, f"unknown Host {', '.join(hosts)!r:.80}: give the server --allow-host for this name"
        if any(origin != f"http://{hosts[0]}" for origin in given.get("origin", ())):
            return 403, "pages of others are not served: the request has another Origin"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "the page only reads"
        if not scope["path"].startswith("/api/"):
            return None
        if given.get("sec-fetch-site", ["same-origin"]) not in (["same-origin"], ["none"]):
            return 403, "pages of others are not served: the request comes from another site"
        if self.token is not None and not has_token(given, self.token):
            return 401, "the token is missing or wrong: open the address that the command printed"
        return None


async def _answer(send: Send, status: int, reason: str) -> None:
    body = reason.encode()
    headers = {**HEADERS, "content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    start = {"type": "http.response.start", "status": status}
    await send(start | {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
    await send({"type": "http.response.body", "body": body})
