"""Code of others that never ends is ended, and what fails in Rust is an error like others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count

import pytest

from plaudit.support.limits import TooSlowError, limited, rust_errors


def endless() -> None:
    for _ in count():
        pass


def test_what_never_ends_is_ended_and_nothing_after_it() -> None:
    for _ in range(2):
        with pytest.raises(TooSlowError):
            limited(0.05, endless)
    assert limited(60, lambda: sum(range(1000))) == 499_500


def test_it_is_ended_in_the_thread_that_it_is_in() -> None:
    ended = []

    def run() -> None:
        try:
            limited(0.05, endless)
        except TooSlowError:
            ended.append(threading.current_thread().name)

    thread = threading.Thread(target=run, name="slow")
    thread.start()
    limited(60, thread.join)
    assert ended == ["slow"]


def test_a_single_long_step_ends_first() -> None:
    with pytest.raises(TooSlowError):
        limited(0.05, partial(time.sleep, 0.5))
    time.sleep(0.3)  # nothing is left that would end what comes


@pytest.mark.slow
def test_calls_end_under_a_profiler() -> None:
    """Python 3.11 hangs under cProfile once a thread's error is taken back that was never raised."""
    code = "from plaudit.support.limits import limited; print(sum(limited(60, lambda: 1) for _ in range(9)))"
    profiled = f"import cProfile; cProfile.run({code!r})"
    found = subprocess.run([sys.executable, "-c", profiled], capture_output=True, text=True, timeout=60)
    assert found.stdout.startswith("9\n"), found.stderr


def test_errors_inside_stay_what_they_are() -> None:
    with pytest.raises(KeyError):
        limited(60, partial({}.__getitem__, "a"))


def test_a_panic_is_an_error() -> None:
    class PanicException(BaseException):
        """As Rust's, which is no Exception."""

    for error in (PanicException("index out of bounds"), Exception("no unknown token")):
        with pytest.raises(ValueError, match=f"the tokenizer fails: {error}"), rust_errors("the tokenizer"):
            raise error
    for other in (KeyboardInterrupt, KeyError, RuntimeError):
        with pytest.raises(other), rust_errors("the tokenizer"):
            raise other
