"""Who may ask a server of ours: what the page and the reward server both look for in a request's headers.

headers -> by_name -> known_host, has_token
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence


def by_name(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Every value of each header, by its name in lower case."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def known_host(given: Mapping[str, Sequence[str]], names: Collection[str]) -> bool:
    """True if the request has one Host that is ours: one of `names`, or an IP address. Another may be a name that a web
    page rebound to this machine."""
    hosts = given.get("host", ())
    if len(hosts) != 1:
        return False
    name = hosts[0].rpartition(":")[0] if hosts[0].rpartition(":")[2].isdigit() else hosts[0]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def has_token(given: Mapping[str, Sequence[str]], token: str) -> bool:
    """True if the request has this bearer token, and no other. The time of the comparison tells nothing of it."""
    found = given.get("authorization", ())
    return len(found) == 1 and hmac.compare_digest(found[0].encode(), f"Bearer {token}".encode())
