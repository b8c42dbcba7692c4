"""The in-process worker group: plain objects, plain calls. The same workers run under Ray.

method, arguments -> do: call the worker, or one part of it, such as a role's learner -> the method's result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from plaudit.runtime.worker import Arguments, Kind_co, Result
from plaudit.runtime.worker_group import WorkerGroup


class LocalWorkerGroup(WorkerGroup[Kind_co]):
    """One rank in this process. Several ranks in one process could not meet in a collective."""

    world = 1

    def __init__(self, worker: Kind_co):
        self.worker = worker

    async def scatter(
        self, method: Callable[[Kind_co, *Arguments], Result], arguments: Sequence[tuple[*Arguments]]
    ) -> list[Result]:
        (mine,) = arguments
        return [do(self.worker, self.name, method.__name__, *mine)]


def do(worker: Any, part: str | None, method: str, *arguments: Any) -> Any:
    """Call a method of the worker, or of its part of that name, and return the result."""
    with nullcontext(worker) if part is None else worker.part(part) as target:
        return getattr(target, method)(*arguments)
