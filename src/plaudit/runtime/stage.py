"""What this process does while it becomes ready: set by its own code, read by processes that wait for it."""

from __future__ import annotations

_stage = [""]


def enter(what: str) -> None:
    """Set the current activity, a verb phrase such as "loads the model"."""
    _stage[0] = what


def now() -> str:
    """The current activity; empty if none was set."""
    return _stage[0]
