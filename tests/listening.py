"""Who listens: the sockets of processes, as the system sees them; and a port that stays free."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Iterable
from pathlib import Path

LISTENING = "0A"


def listening(processes: Iterable[int]) -> dict[tuple[str, int], int]:
    """Address and port of each TCP socket that they listen on, and whose it is."""
    bound = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING:
                address, port = words[1].split(":")
                parts = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                bound[f"socket:[{words[9]}]"] = (str(ipaddress.ip_address(b"".join(parts))), int(port, 16))
    found = {}
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                name = str(descriptor.readlink())
            except OSError:
                continue
            if name in bound:
                found[bound[name]] = process
    return found


def free_port() -> int:
    """A port for a process that will listen there, or listen again. It is below those that systems give to connections
    and to listeners without a port of their own, which would take it while nobody listens."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError("a hundred ports from 20000 to 32000 are taken")


def from_elsewhere(address: str) -> bool:
    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found
    return not found.is_loopback
