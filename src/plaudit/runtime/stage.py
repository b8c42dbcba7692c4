"""What this process is doing while it becomes ready: told by who does it, asked by who waits for it elsewhere."""

from __future__ import annotations

_stage = [""]


def enter(what: str) -> None:
    """From now on this process does so; a verb phrase, as "loads the model"."""
    _stage[0] = what


def now() -> str:
    """Nothing where nobody told."""
    return _stage[0]
