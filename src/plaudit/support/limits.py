"""Limit third-party code: chat templates that never end, tokenizers that fail in Rust."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class TooSlowError(RuntimeError):
    """The code took longer than it may."""


class _Watch:
    """A thread that raises TooSlowError in threads whose code runs too long, and sleeps while none runs.

    The error arrives between two bytecodes: a single long one, such as a huge power, ends first. It is raised again
    until the thread has left that code, since a destructor may have swallowed it."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget the calls of other threads, which a forked process does not have."""
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> int:
        ident = threading.get_ident()
        with self._lock:
            self._ends[ident] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="plaudit-limits", daemon=True)
                self._thread.start()
            self._some.set()
        return ident

    def end(self, ident: int) -> None:
        """End the thread's limit. Raises TooSlowError if its time is over, even if none has reached it yet."""
        with self._lock:
            end = self._ends.pop(ident, math.inf)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)
        if end < time.monotonic():
            raise TooSlowError

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(0.2)
            with self._lock:
                now = time.monotonic()
                for ident in [ident for ident, end in self._ends.items() if end < now]:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(TooSlowError))
                if not self._ends:
                    self._some.clear()


_watch = _Watch()


def limited(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns. Raises TooSlowError in this thread if it takes longer. Not to be nested."""
    ident = _watch.begin(seconds)
    try:
        try:
            return call()
        finally:
            _watch.end(ident)
    finally:
        _watch.end(ident)  # the exception may have come as the first one began


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Raise ValueError for a library's failure in Rust: a bare Exception, or a panic, a BaseException that
    `except Exception` does not catch."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(f"{what} fails: {error}") from error
        raise
