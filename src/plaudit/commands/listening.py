"""Sockets of our HTTP servers, the page and the reward server, and the bounds of their connections.

    a folder of runs -> serve_page -> page/app.py -> uvicorn -> a browser

Clients may send half a head or half a body, or read nothing. Bounds keep these from shutting other addresses out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

HEADER_SECONDS = 10.0
"""Seconds that a client may take to send a request's head. Each application limits the time for a body."""
READ_SECONDS = 60.0
"""Seconds after which a connection is closed if its client reads nothing of the answer."""
OF_ALL = 512
"""Limit of connections. Above it, each new one closes one that waits for its client: the oldest of the client address
that has most of these."""
OF_ONE_PEER = 256
"""Limit of connections of one client: an IPv4 address or an IPv6 /64."""
_turns = itertools.count()


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Call it before loading anything, so that a used port is reported at once. Raises
    ValueError if it cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, TypeError, UnicodeError) as error:  # the last two: an invalid host name
        why = error.strerror if isinstance(error, OSError) else "it is no host"
        raise ValueError(f"cannot listen on {host} port {port}: {why}. Give another --host or --port") from error


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket, for browsers and clients."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bounded_protocol() -> type:
    """Return a subclass of uvicorn's HTTP protocol with the bounds of `Bounded`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("BoundedProtocol", (Bounded, H11Protocol), {})


def serve_http(
    app: Any,
    protocol: type,
    listening: socket.socket,
    within: AbstractAsyncContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
) -> None:
    """Serve until SIGTERM or Ctrl-C. Open requests are answered first, for at most five seconds. `within` is entered
    before any request and left after the last, in the event loop that answers them."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await within.__aenter__()
            await super().startup(sockets)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            await within.__aexit__(None, None, None)

    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=OF_ALL,
        timeout_graceful_shutdown=5,
    )
    Server(config).run(sockets=[listening])


def serve_page(folder: Path, *, host: str, port: int, allow_hosts: Iterable[str], say: Callable[[str], None]) -> None:
    """Serve the page that shows runs (`plaudit monitor --serve`) until Ctrl-C. If other machines can reach the address,
    it requires a token, which is part of the printed URL."""
    from plaudit.page.app import application

    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    names = ("localhost", socket.gethostname(), host, *allow_hosts)
    page: Any = application(folder, names=names, token=token)
    listening = listen(host, port)
    say(f"the runs in {folder}: {address_of(listening)}/{f'#token={token}' if token else ''}  (Ctrl-C ends it)")
    serve_http(page, bounded_protocol(), listening)


class Bounded:
    """Mixin for uvicorn's protocol that limits how long connections wait for their client. uvicorn itself waits
    forever, and they count towards its limit of connections."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    cycle: Any
    client: tuple[str, int] | None
    peer = ""
    turn = 0
    """Order of connections by when they were opened, or finished their last answer: later ones have a greater number.
    A loop's clock would not do: uvloop's has only milliseconds."""
    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._timers = {}
        self.peer, self.turn = peer_of(self.client[0] if self.client else ""), next(_turns)
        self._watch()
        own = [one for one in self.connections if one.peer == self.peer]
        if len(own) > OF_ONE_PEER:
            _close_one(own)
        elif len(self.connections) >= OF_ALL:
            _close_one(self.connections - {self})

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        self._watch()

    def on_response_complete(self) -> None:
        self.turn = next(_turns)
        super().on_response_complete()  # type: ignore[misc]
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._start("read", READ_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._stop("read")

    def connection_lost(self, error: Exception | None) -> None:
        self._stop("head")
        self._stop("read")
        super().connection_lost(error)  # type: ignore[misc]

    @property
    def waits(self) -> bool:
        """True if the server waits for the client of this connection: to send a head or a body, or to read more."""
        return bool(self._idle or self.cycle.more_body or "read" in self._timers)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start the timer of a connection without an open request, which must send a head in time; else stop it."""
        if self._idle:
            self._start("head", HEADER_SECONDS)
        else:
            self._stop("head")

    def _start(self, name: str, seconds: float) -> None:
        """Start the timer `name`: it closes the connection after `seconds`. If it is running already, leave it."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def _close_one(connections: Iterable[Any]) -> None:
    """Of the client address with the most waiting connections, close the one that has waited longest."""
    waiting = [one for one in connections if one.waits]
    held = Counter(one.peer for one in waiting)
    if waiting:
        oldest = max(waiting, key=lambda one: (held[one.peer], -one.turn))
        oldest.connections.discard(oldest)  # not counted from now on, though the loop closes it later
        oldest.transport.abort()


def peer_of(host: str) -> str:
    """Return the peer that connections are counted for: an IPv4 address, or the /64 of an IPv6 one (one owner)."""
    plain = host.partition("%")[0]
    return str(ipaddress.ip_network((plain, 64), strict=False)) if ":" in plain else plain
