"""By which address other machines reach this one."""

from __future__ import annotations

import socket


def own_address() -> str:
    """No packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:  # no network at all
        return "127.0.0.1"
