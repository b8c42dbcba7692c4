"""Heartbeat files of a node's processes, so that one process can vouch for all of them.

    each process -> touches a file of its own, in a thread of its own -> `fresh` reads those of its neighbours

A process without a recent heartbeat may still be alive, so the driver then asks it directly.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from plaudit.runtime import stage

PAUSE = 0.25
"""Seconds between two heartbeats of a process."""


def begin(node: str) -> None:
    """Touch this process's file in a thread until it ends, is stopped or has failed. Without a folder, do nothing."""
    if (folder := _folder(node)) is None:
        return
    for old in folder.glob("[0-9]*"):
        if not Path("/proc", old.name).exists() and Path("/proc/self").exists():  # it was killed
            old.unlink(missing_ok=True)
    threading.Thread(target=_beat, args=(folder / str(os.getpid()),), daemon=True).start()


def fresh(node: str, processes: Iterable[int], within: float) -> list[int]:
    """Return those of the process ids whose last heartbeat is at most `within` seconds old."""
    folder = _folder(node)
    return [] if folder is None else [one for one in processes if _age(folder / str(one)) <= within]


def _beat(file: Path) -> None:
    while not stage.failed():
        file.touch()
        time.sleep(PAUSE)


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")


def _folder(node: str) -> Path | None:
    """Make and return the folder of a node's heartbeat files, closed to other users. Return None if it cannot be made,
    or belongs to another user, who could forge heartbeats."""
    folder = Path(tempfile.gettempdir(), f"plaudit-{os.geteuid()}")
    try:
        for part in (folder, folder / node):
            part.mkdir(mode=0o700, exist_ok=True)
            if part.is_symlink() or part.stat().st_uid != os.geteuid():
                return None
        folder.chmod(0o700)
    except OSError:
        return None
    return folder / node
