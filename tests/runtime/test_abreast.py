"""A worker whose processes do each call together, without processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plaudit.runtime.ray_worker_group import Abreast
from plaudit.runtime.worker import WorkerLost


class Process:
    def __init__(self, name: str):
        self.name, self.ended = name, ""
        self.lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()

    async def gone(self) -> WorkerLost:
        return await asyncio.shield(self.lost)

    def kill(self, reason: str) -> None:
        self.ended = reason


class Pair:
    """A worker group of two whose calls take a turn of the event loop."""

    def __init__(self) -> None:
        self.workers = [Process("judge 0"), Process("judge 0, process 1")]
        self.under_way = self.most = 0

    async def each(self, method: Any, number: int) -> list[int]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return [method(number), method(number)]


def score(number: int) -> int:
    return 10 // number


def test_calls_come_one_after_another_and_the_first_process_answers() -> None:
    async def asked() -> None:
        worker_group: Any = Pair()
        one: Abreast[Any] = Abreast("judge 0", worker_group)
        assert await asyncio.gather(*(one.call(score, number) for number in (1, 2, 5))) == [10, 5, 2]
        assert worker_group.most == 1

    asyncio.run(asked())


def test_an_error_in_a_call_ends_all_processes() -> None:
    """Others may wait for the one where it came up."""

    async def asked() -> None:
        worker_group: Any = Pair()
        one: Abreast[Any] = Abreast("judge 0", worker_group)
        for _ in range(2):
            with pytest.raises(WorkerLost, match=r"judge 0: .*out of step \(integer division"):
                await one.call(score, 0)
        assert all(process.ended for process in worker_group.workers)

    asyncio.run(asked())


def test_it_is_lost_with_any_of_its_processes() -> None:
    async def asked() -> None:
        worker_group: Any = Pair()
        one: Abreast[Any] = Abreast("judge 0", worker_group)
        worker_group.workers[1].lost.set_result(WorkerLost("judge 0, process 1", "it was killed"))
        assert "process 1: it was killed" in (await one.gone()).reason
        assert all(process.ended for process in worker_group.workers)

    asyncio.run(asked())
