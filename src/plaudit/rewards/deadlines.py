"""Interrupts calls that take too long: by a timer's signal in the main thread, by a watching thread in others.

Left out: calls in threads of their own (`functions.in_thread`), which nobody waits for after their deadline.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

from plaudit.runtime.coroutines import raise_in


class Late(BaseException):
    """A call took too long. It is no Exception, so functions that catch those are interrupted too."""


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise Late inside the block after this time. A function that sets the process's timer itself replaces ours."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":  # no setitimer there
        with _WATCH.interrupting(seconds):
            yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Watch:
    """A thread that raises Late in other threads whose calls take too long. It ends after some time without calls.

    Starting a thread for every call would take longer than most calls."""

    EVERY, IDLE = 0.05, 20
    """Seconds between two checks, and the number of checks without a call after which the thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}  # by thread
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def interrupting(self, seconds: float) -> Iterator[None]:
        here = threading.get_ident()
        with self._lock:
            self._until[here] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:  # Late can be raised here, but not after it
                self._until.pop(here, None)

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(self.EVERY)
            with self._lock:
                idle = 0 if self._until else idle + 1
                if idle > self.IDLE:
                    self._thread = None
                    return
                now = time.monotonic()
                for thread in [thread for thread, until in self._until.items() if until <= now]:
                    del self._until[thread]
                    raise_in(thread, Late)


_WATCH = _Watch()
