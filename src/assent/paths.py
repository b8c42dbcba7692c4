"""Paths as people write them in files."""

from __future__ import annotations

from pathlib import Path


def at_home(path: str | Path) -> Path:
    """With the home folder in the place of `~`, which a shell leaves to us in a file; unknown homes as they stand."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
