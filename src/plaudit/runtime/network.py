"""By which address, and through which interface, other machines reach this one, and how collectives fail."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


def own_address() -> str:
    """No packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:  # no network at all
        return "127.0.0.1"


def interface_of(address: str) -> str | None:
    """Which interface has this address; None where the system does not say."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asked.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def let_gloo_be_reached() -> None:
    """Have gloo listen where `own_address` is, unless GLOO_SOCKET_IFNAME says otherwise. By itself it takes the address
    of this machine's name, which is a loopback one on many machines: no other machine would reach it."""
    interface = interface_of(own_address())
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def let_nccl_raise() -> None:
    """Have NCCL's groups that are made from here on raise a time-out in whoever waits, as gloo does. By themselves they
    end the process, so that one which waited for a stuck rank would look like the lost one. The price: a wait holds up
    the CPU as well. Not tried on GPUs, for which it takes two."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
