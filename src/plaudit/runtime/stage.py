"""This process's current start-up activity, and the reason if it has failed: set by its own code, read by processes
that wait for it."""

from __future__ import annotations

_stage, _failure = [""], [""]


def enter(what: str) -> None:
    """Set the current activity, a verb phrase such as "loads the model"."""
    _stage[0] = what


def now() -> str:
    """The current activity; empty if none was set."""
    return _stage[0]


def fail(reason: str) -> None:
    """Record that this process has failed; the next heartbeat makes it count as lost for this reason."""
    _failure[0] = reason


def failed() -> str:
    """Return the reason why this process has failed; "" if it has not."""
    return _failure[0]


def check() -> None:
    """Raise RuntimeError with the reason if this process has failed."""
    if failed():
        raise RuntimeError(failed())
