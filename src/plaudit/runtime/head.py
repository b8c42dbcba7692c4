"""Whether a cluster's head still answers: asked from a thread. People are told where it does not, and after a while the
process ends.

The run's event loop can do neither: Ray's own questions about the cluster wait for the head. Ray means to end the
process after a minute of that, which works where the head is gone, and not where it is frozen. Knows no Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator

SIGNS = 4
"""Questions within the time that the head has for an answer."""
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's own variable: how long its processes wait for a head."""
AGAIN = "resume=latest goes on from the newest checkpoint"


class HeadWatch:
    """Asks until it is closed. Counts pauses, not seconds: where this process stands still, so does the count."""

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
        """`ask` tells whether the head answered, raises, or takes as long as it likes. Without a sign for `timeout`
        seconds people are told, and after `patience` more it is the end; `again` says how the run then goes on."""
        self._ask, self._timeout, self._patience, self._say, self._end = ask, timeout, patience, say, end
        self._again, self._missed = again, 0
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ask no more; a question that is under way is waited for, for a second."""
        self._closed.set()
        for thread in self._threads:
            thread.join(1.0)

    def _listen(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(Exception):  # no answer either, whatever it is
                if self._ask():
                    told, self._missed = self._missed > SIGNS, 0
                    if told and not self._closed.is_set():
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
    """Around a farewell to a cluster, for which a frozen head lets one wait: after `patience` seconds it is the end."""

    def enough() -> None:
        text = f"the cluster's head has not let this run go for {patience:g} s ({PATIENCE}): its process ends"
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
    """Whoever listens may be gone, or never come back from it: whoever tells goes on."""

    def tell() -> None:
        with contextlib.suppress(Exception):
            say(text)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    return telling
