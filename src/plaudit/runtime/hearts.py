"""Ask Ray workers for heartbeats.

RayWorker, once started -> Hearts.add -> RayWorker.vouches, found -> workers that do not answer are lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from plaudit.runtime.ray_worker import RayWorker


class Hearts:
    """Checks all workers four times per heartbeat_timeout. On each node one worker is asked, and reports which of its
    neighbours have a recent heartbeat (it vouches for them); the other neighbours are asked directly."""

    def __init__(self) -> None:
        self._there: dict[str, list[RayWorker[Any]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, worker: RayWorker[Any]) -> None:
        if worker.node not in self._there:
            self._there[worker.node] = []
            self._in_background(self._listen(worker.node))
        self._there[worker.node].append(worker)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _listen(self, node: str) -> None:
        asked: dict[RayWorker[Any], asyncio.Task[Any]] = {}
        while there := [worker for worker in self._there[node] if worker.alive]:
            self._there[node] = there
            first, *others = there
            well = set(await first.vouches(others))
            for worker in others:
                if worker.pid not in well and (worker not in asked or asked[worker].done()):
                    asked[worker] = self._in_background(worker.found())
            await asyncio.sleep(first.heartbeat_timeout / 4)
        del self._there[node]

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
