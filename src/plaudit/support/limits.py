"""Limit third-party code: calls that take too long, such as of chat templates, and tokenizers that fail in Rust."""

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
    """A thread that raises an error in threads whose calls take too long. It ends after some time without calls.

    The error arrives between two bytecodes: a single long one, such as a huge power, ends first. It is raised again
    until the thread has left the call, since a destructor may have swallowed it."""

    EVERY, IDLE = 0.05, 20
    """Seconds between two checks of the time limits; number of checks without a call after which the thread ends."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget all calls: in a forked process, the threads that made them do not exist."""
        self._lock = threading.Lock()
        self._ends: dict[object, tuple[int, float, type[BaseException]]] = {}
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float, error: type[BaseException]) -> object:
        call = object()
        with self._lock:
            self._ends[call] = threading.get_ident(), time.monotonic() + seconds, error
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="plaudit-limits", daemon=True)
                self._thread.start()
        return call

    def end(self, call: object) -> None:
        """End a call's limit. Raises its error if the time was over, even if it has not reached the thread yet."""
        with self._lock:
            _, end, error = self._ends.pop(call, (0, math.inf, TooSlowError))
            late = end < time.monotonic()  # else the watch has raised nothing: it looks at the same clock before this
            if late:  # what it raised may not have arrived; an error taken back for nothing makes cProfile hang
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)
        if late:
            raise error

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(self.EVERY)
            with self._lock:
                idle = 0 if self._ends else idle + 1
                if idle > self.IDLE:
                    self._thread = None
                    return
                now = time.monotonic()
                for ident, end, error in self._ends.values():
                    if end < now:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


_watch = _Watch()


def limited(seconds: float, call: Callable[[], T], error: type[BaseException] = TooSlowError) -> T:
    """Return what a call returns. Raises `error` in this thread if it takes longer."""
    begun = _watch.begin(seconds, error)
    try:
        try:
            return call()
        finally:
            _watch.end(begun)
    finally:
        _watch.end(begun)  # again: the error may have been raised at the start of the first `end`


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
