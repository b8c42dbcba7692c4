"""Signs of life that the processes of a node leave for each other, so that one of them can vouch for all.

    each process -> touches a file of its own, in a thread of its own -> `fresh` reads those of its neighbours

A process that is not vouched for need not be lost: whoever asks then asks it itself.
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
"""Seconds between two signs."""


def begin(node: str) -> None:
    """Leave signs from now on, until this process ends, stops, or has failed."""
    folder = _folder(node)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.iterdir():
        if not Path("/proc", old.name).exists() and Path("/proc/self").exists():  # it was killed
            old.unlink(missing_ok=True)
    threading.Thread(target=_beat, args=(folder / str(os.getpid()),), daemon=True).start()


def fresh(node: str, processes: Iterable[int], within: float) -> list[int]:
    """Those of the processes that left a sign within so many seconds."""
    return [process for process in processes if _age(_folder(node) / str(process)) <= within]


def _beat(file: Path) -> None:
    while not stage.failed():
        file.touch()
        time.sleep(PAUSE)


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")


def _folder(node: str) -> Path:
    return Path(tempfile.gettempdir(), f"plaudit-{os.getuid()}", node)
