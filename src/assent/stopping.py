"""Ending a run on a signal: the first one is noted and the loop ends at its next step, saved; a second acts as ever,
but for one that the terminal is gone, which often comes twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""What a terminal sends that is closed; some systems have none."""


class Stopped(Exception):
    """The run was asked to stop by a signal; it saved before it did. `code` is the exit status that tells so."""

    def __init__(self, signum: int, step: int | None):
        """`step` None: while workers were being started, with nothing new to save."""
        when = "before its workers were ready" if step is None else f"after step {step}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {when}; resume=latest goes on from there")
        self.code = 128 + signum


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that holds the signal once SIGTERM, SIGINT or (unless it is ignored, as under nohup) SIGHUP came. Outside
    the main thread signals are left alone."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if number == HANGUP else handler)

    numbers = [int(signal.SIGTERM), int(signal.SIGINT)]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    try:
        for number in numbers:
            previous[number] = signal.signal(number, note)
    except ValueError:  # not in the main thread: whoever owns it deals with signals
        previous.clear()
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def unless(stop: list[int], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Cancels it and raises Stopped once there is a signal in `stop`."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if stop:
            task.cancel()
            await asyncio.wait((task,))
            raise Stopped(stop[0], None)
        await asyncio.wait((task,), timeout=0.1)
    return task.result()
