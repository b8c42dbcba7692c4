"""`plaudit monitor --serve`: the page to read runs, for browsers on this machine.

    a folder of runs -> monitor/app.py -> uvicorn -> a browser

Where others can reach the address, the page asks for a token, which is part of the printed address.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from plaudit.commands.listening import address_of, is_loopback, listen


def serve_page(folder: Path, *, host: str, port: int, allow_hosts: Iterable[str], say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Raises ImportError with the install command."""
    try:
        import uvicorn

        from plaudit.monitor.app import application
    except ImportError as error:
        raise ImportError(
            f"the page needs {error.name}: pip install -e '.[serve]' in Plaudit's folder. Without it, each run keeps a "
            "page.html, and `plaudit monitor FOLDER` draws PNGs"
        ) from None
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    names = frozenset(name.lower() for name in ("localhost", socket.gethostname(), host, *allow_hosts))
    page: Any = application(folder, names=names, token=token)
    listening = listen(host, port)
    say(f"the runs in {folder}: {address_of(listening)}/{f'#token={token}' if token else ''}  (Ctrl-C ends it)")
    config = uvicorn.Config(
        page, ws="none", lifespan="off", log_level="warning", access_log=False, server_header=False, proxy_headers=False
    )
    uvicorn.Server(config).run(sockets=[listening])
