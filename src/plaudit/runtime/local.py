"""The in-process gang: plain objects, plain calls. The same workers run under Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit.runtime.gang import Gang


class LocalGang(Gang):
    """One rank in this process. A process holds one rank: several in turn could not meet in a collective."""

    world = 1

    def __init__(self, worker: Any):
        self.worker = worker

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        (mine,) = arguments
        return [getattr(self.worker, method)(*mine)]

    async def any(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)
