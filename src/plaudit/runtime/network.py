"""Find the address and interface by which other machines reach this one; let gloo use it, and NCCL raise time-outs."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""
_held: dict[str, socket.socket] = {}
"""{address from `free_address`: the socket that holds its port until `listening` takes it}."""


def own_address() -> str:
    """Return the address of interface GLOO_SOCKET_IFNAME, or of the default route, else 127.0.0.1. Send no packet."""
    if (chosen := _address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))) is not None:
        return chosen
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:  # no network at all
        return "127.0.0.1"


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address; None if none is found (always outside Linux)."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    if sys.platform != "linux" or not interface:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):  # it has no address
        found = fcntl.ioctl(asked.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(found[20:24])
    return None


def free_address(*, held: bool = True) -> str:
    """Return host:port with a free port of this host, which this process holds until `listening` takes it. With
    `held=False` the port is released, so that any process can take it."""
    host = own_address()
    listener = socket.create_server((host, 0))
    address = f"{host}:{listener.getsockname()[1]}"
    if held:
        _held[address] = listener
    else:
        listener.close()
    return address


def listening(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens at this address only, for torch's TCPStore. By default the store
    would listen on all interfaces, without a password."""
    return (_held.pop(f"{host}:{port}", None) or socket.create_server((host, port))).detach()


def let_gloo_be_reached() -> None:
    """Let gloo listen at `own_address`, unless GLOO_SOCKET_IFNAME is set. By default it uses the address of the
    machine's name, often a loopback address that no other machine reaches."""
    interface = interface_of(own_address())
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def let_nccl_raise() -> None:
    """Let NCCL's new groups raise a time-out in the waiting process, as gloo does. By default they end the process, so
    that a process that waited for a stuck rank would look like the lost one. The price: a wait also blocks the CPU. Not
    tried on GPUs, since it takes two."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
