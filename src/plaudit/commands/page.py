"""`plaudit monitor --serve`: serve the page that shows runs in a browser.

    a folder of runs -> page/app.py -> uvicorn -> a browser

If other machines can reach the address, the page requires a token, which is part of the printed URL.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from plaudit.commands.listening import address_of, bounded_protocol, is_loopback, listen, serve_http


def serve_page(folder: Path, *, host: str, port: int, allow_hosts: Iterable[str], say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C."""
    from plaudit.page.app import application

    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    names = ("localhost", socket.gethostname(), host, *allow_hosts)
    page: Any = application(folder, names=names, token=token)
    listening = listen(host, port)
    say(f"the runs in {folder}: {address_of(listening)}/{f'#token={token}' if token else ''}  (Ctrl-C ends it)")
    serve_http(page, bounded_protocol(), listening)
