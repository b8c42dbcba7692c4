"""What this process does while it becomes ready, and why it can do nothing any more: set by its own code, read by
processes that wait for it."""

from __future__ import annotations

_stage, _failure = [""], [""]


def enter(what: str) -> None:
    """Set the current activity, a verb phrase such as "loads the model"."""
    _stage[0] = what


def now() -> str:
    """The current activity; empty if none was set."""
    return _stage[0]


def fail(reason: str) -> None:
    """Count as lost, for this reason, from the next heartbeat on."""
    _failure[0] = reason


def failed() -> str:
    """Why this process has failed; empty if it has not."""
    return _failure[0]


def check() -> None:
    """Raise RuntimeError with the reason if this process has failed."""
    if failed():
        raise RuntimeError(failed())
