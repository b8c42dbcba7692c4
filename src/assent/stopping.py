"""Ending a run on a signal: the first one is noted and the loop ends at its next step, saved; a second acts as ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """The run was asked to stop by a signal; it saved before it did. `code` is the exit status that tells so."""

    def __init__(self, signum: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(signum).name} after step {step}; resume=latest goes on from there"
        )
        self.code = 128 + signum


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that holds the signal once SIGTERM or SIGINT came. Outside the main thread signals are left alone."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, handler)

    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not in the main thread: whoever owns it deals with signals
        previous.clear()
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
