"""Ending a run by a signal.

While data is read, a signal ends the run at once. Later, the first signal lets the loop save its current step and end.
A second signal has its usual effect, except SIGHUP, which often comes twice and is then ignored.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from plaudit.support.errors import Stopped as Stopped

Result = TypeVar("Result")

HANGUP: int | None = None if sys.platform == "win32" else signal.SIGHUP
"""Signal of a closed terminal; some systems have none."""


class _Interrupted(KeyboardInterrupt):
    """Derived from KeyboardInterrupt, so that code that handles Ctrl-C handles the other signals too."""


@contextmanager
def stops_for_caller() -> Iterator[None]:
    """Turn a Stopped that is raised inside into KeyboardInterrupt (after Ctrl-C) or SystemExit."""
    try:
        yield
    except Stopped as stopped:
        raise stopped.for_caller() from None


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """While active, SIGTERM, SIGINT or SIGHUP raises Stopped immediately; nothing needs saving yet."""

    def interrupt(signum: int, frame: Any) -> None:
        raise _Interrupted(signum)

    try:
        with _heard(interrupt):
            yield
    except _Interrupted as interrupted:
        raise Stopped(interrupted.args[0], None) from None


@contextmanager
def stop_signals(say: Callable[[str], None] = lambda text: None) -> Iterator[list[int]]:
    """Yield a list to which the first signal's number is appended; `say` reports that signal."""
    received: list[int] = []

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if number == HANGUP else handler)
        with suppress(RuntimeError, OSError):  # the signal interrupted a print, or the output is closed
            again = "" if signum == HANGUP else "; a second one ends it at once"
            say(f"{signal.Signals(signum).name}: the run ends once its last step is saved{again}")

    with _heard(note) as previous:
        try:
            yield received
        except KeyboardInterrupt as second:
            second.add_note("within a step; what was saved before it is kept, and resume=latest continues from there")
            raise


@contextmanager
def _heard(handle: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Install `handle` for SIGTERM, SIGINT and (unless ignored, as under nohup) SIGHUP; yield the previous handlers.
    Outside the main thread, signals are left alone."""
    previous: dict[int, Any] = {}
    numbers = [int(signal.SIGTERM), int(signal.SIGINT)]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        numbers.append(HANGUP)
    try:
        for number in numbers:
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread, whose owner handles signals
        previous.clear()
    try:
        yield previous
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def unless(stop: list[int], work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If `stop` receives a signal first, cancel the work and raise Stopped."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if stop:
            task.cancel()
            await asyncio.wait((task,))
            raise Stopped(stop[0], None)
        await asyncio.wait((task,), timeout=0.1)
    return task.result()
