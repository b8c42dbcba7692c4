"""Ending a run on a signal: at once while its data is read; then the first one is noted and the loop ends at its next
step, saved; a second acts as ever, but for one that the terminal is gone, which often comes twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""What a terminal sends that is closed; some systems have none."""


class Stopped(Exception):
    """The run was asked to stop by a signal; it saved before it did. `code` is the exit status that tells so."""

    def __init__(self, signum: int, step: int | None):
        """`step` None: before its workers were ready, with nothing new to save."""
        when = "before its workers were ready" if step is None else f"after step {step}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {when}; resume=latest goes on from there")
        self.code = 128 + signum


class _Interrupted(KeyboardInterrupt):
    """Whatever ends well on Ctrl-C does so on the others."""


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Within it such a signal raises Stopped wherever things are: nothing has been learned yet."""

    def interrupt(signum: int, frame: Any) -> None:
        raise _Interrupted(signum)

    try:
        with _heard(interrupt):
            yield
    except _Interrupted as interrupted:
        raise Stopped(interrupted.args[0], None) from None


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that holds the signal once one came."""
    received: list[int] = []

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if number == HANGUP else handler)

    with _heard(note) as previous:
        yield received


@contextmanager
def _heard(handle: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Has SIGTERM, SIGINT and (unless it is ignored, as under nohup) SIGHUP handled so; gives the handlers that they
    had. Outside the main thread signals are left alone."""
    previous: dict[int, Any] = {}
    numbers = [int(signal.SIGTERM), int(signal.SIGINT)]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    try:
        for number in numbers:
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread: whoever owns it deals with signals
        previous.clear()
    try:
        yield previous
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
