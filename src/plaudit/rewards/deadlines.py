"""Interrupt calls that take too long: by a timer's signal in the main thread, by a watching thread in others.

Left out: calls in threads of their own (`functions.in_thread`), which nobody waits for after their deadline.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from plaudit.support.limits import limited

T = TypeVar("T")


class Late(BaseException):
    """A call took too long. It is no Exception, so functions that catch those are interrupted too."""


def interrupted_after(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns; after `seconds`, raise Late inside it. A function that sets the process's interval
    timer itself replaces ours."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":  # no setitimer there
        return limited(seconds, call, Late)

    def interrupt(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
