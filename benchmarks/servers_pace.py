"""A plugin of `servers.py`: workers as slow as devices that take so long for a token, one of them three times slower.

Real passes of four workers on two cores would slow each other, and no worker would have a pace of its own.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from pathlib import Path
from typing import Any

from plaudit.batch import Batch
from plaudit.servers.pusher import Pusher

PER_TOKEN, SLOWER = 0.004, 3.0
prepare = Pusher.prepare


def slowest() -> bool:
    """True in one process of all: the first that asks."""
    try:
        Path(os.environ["SERVERS_PACE"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@wraps(prepare)  # a call travels by its name
def paced(self: Pusher, batch: Batch, *more: Any) -> Any:
    if "pace" not in vars(self):
        self.pace = PER_TOKEN * (SLOWER if slowest() else 1.0)  # type: ignore[attr-defined]
    until = time.monotonic() + self.pace * len(batch.tokens)  # type: ignore[attr-defined]
    found = prepare(self, batch, *more)
    time.sleep(max(0.0, until - time.monotonic()))
    return found


if "SERVERS_PACE" in os.environ:
    Pusher.prepare = paced  # type: ignore[method-assign, assignment]
