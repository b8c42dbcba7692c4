"""Sockets of our HTTP servers."""

from __future__ import annotations

import ipaddress
import socket


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
    ValueError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror}. Give another --host or --port"
        ) from error


def address_of(listening: socket.socket) -> str:
    """The URL for browsers and clients."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
