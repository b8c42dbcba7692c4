"""Restrict who may send requests to the page or the reward server: by the Host header, and by a token.

    request -> known_hosts -> the application, where has_token asks for the token

Any web page that a person visits can send requests to this machine, also under a name that it rebinds to 127.0.0.1.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Host, Router
from starlette.types import ASGIApp


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
    """True if the request has this bearer token, and no other. The comparison takes constant time."""
    found = request.headers.getlist("authorization")
    return len(found) == 1 and hmac.compare_digest(found[0].encode(), f"Bearer {token}".encode())
