"""Watch from a thread whether a Ray cluster's head node still answers. If not, report it, and later end the process.

The run's event loop cannot do this, since Ray's own queries wait for the head. Ray ends a process after a minute
without a head, but not if the head is frozen. Knows no Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator

SIGNS = 4
"""Number of times that the head is asked within `timeout`."""
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable for how long its processes wait for a lost head to answer again."""
AGAIN = "resume=latest continues from the newest checkpoint"


class HeadWatch:
    """Asks the head until closed. It counts pauses, not seconds: time while this process is stopped does not count."""

    def __init__(
        self,
        ask: Callable[[], object],
        *,
        timeout: float,
        patience: float,
        say: Callable[[str], None],
        again: str = AGAIN,
        end: Callable[[], object] = lambda: os._exit(1),
    ):
        """`ask` returns True if the head answered; it may also raise or block. After `timeout` seconds without an
        answer this is reported; after `patience` more, the process ends. `again` tells users how to continue."""
        self._ask, self._timeout, self._patience, self._say, self._end = ask, timeout, patience, say, end
        self._again, self._missed = again, 0
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop asking; wait at most a second for a running question."""
        self._closed.set()
        for thread in self._threads:
            thread.join(1.0)

    def _listen(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(Exception):  # any error counts as no answer
                if self._ask():
                    was_silent, self._missed = self._missed > SIGNS, 0
                    if was_silent and not self._closed.is_set():
                        _told(self._say, "the cluster's head answers again")
            self._closed.wait(self._timeout / SIGNS)

    def _count(self) -> None:
        last = SIGNS + 1 + max(1, math.ceil(self._patience / self._timeout * SIGNS))
        while not self._closed.wait(self._timeout / SIGNS):
            self._missed += 1
            if self._missed == SIGNS + 1:
                _told(
                    self._say,
                    f"the cluster's head has given no sign for {self._timeout:g} s (runtime.heartbeat_timeout). Unless "
                    f"it does within {self._patience:g} s more ({PATIENCE}), this run ends: {self._again}",
                )
            if self._missed == last:
                _told(self._say, f"the cluster's head is lost: {self._again}").join(1.0)
                self._end()


@contextlib.contextmanager
def parting(
    patience: float, say: Callable[[str], None], end: Callable[[], object] = lambda: os._exit(1)
) -> Iterator[None]:
    """Limit the time for leaving a cluster, which a frozen head would block: after `patience` seconds the process
    ends."""

    def enough() -> None:
        text = (
            f"the cluster's head has not answered this run's goodbye for {patience:g} s ({PATIENCE}): the process ends"
        )
        _told(say, text).join(1.0)
        end()

    timer = threading.Timer(patience, enough)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _told(say: Callable[[str], None], text: str) -> threading.Thread:
    """Call `say` in a daemon thread, since it may fail or never return. Return the thread."""

    def tell() -> None:
        with contextlib.suppress(Exception):
            say(text)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    return telling
