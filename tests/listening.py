"""Who listens: the sockets of processes, as the system sees them."""

from __future__ import annotations

import ipaddress
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


def from_elsewhere(address: str) -> bool:
    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found
    return not found.is_loopback
