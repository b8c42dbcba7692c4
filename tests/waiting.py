"""Waiting for what other processes do: as long as it takes on a loaded machine, no longer where it is there at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "a condition", *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: in vain for {seconds:g} s"
        time.sleep(0.02)


async def eventually(condition: Callable[[], object], what: str = "a condition", *, seconds: float = 120.0) -> None:
    """`until` for an event loop that has other work meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: in vain for {seconds:g} s"
        await asyncio.sleep(0.02)
