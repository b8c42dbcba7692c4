"""The in-process gang, and coroutines from plain code."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from plaudit.runtime.coroutines import Background, finished, together
from plaudit.runtime.gang import Gang, Part
from plaudit.runtime.local import LocalGang


class Numbers:
    """Stands for a batch: units that can be spread over ranks."""

    def __init__(self, *numbers: int):
        self.numbers = numbers

    def shards(self, world: int) -> list[Numbers]:
        return [Numbers(*self.numbers[rank::world]) for rank in range(world)]


class Adder:
    def __init__(self) -> None:
        self.total = 0

    def add(self, batch: Numbers, times: int) -> int:
        if times < 0:
            raise ArithmeticError("times must not be negative")
        self.total += times * sum(batch.numbers)
        return self.total


def test_a_gang_of_one_answers_like_its_worker() -> None:
    gang = LocalGang(Adder())
    assert gang.world == 1
    assert asyncio.run(gang.split("add", Numbers(1, 2, 3), 2)) == [12]
    assert asyncio.run(gang.each("add", Numbers(1), 1)) == [13]
    assert asyncio.run(gang.any("add", Numbers(), 1)) == 13


class Two(Gang):
    """Two ranks, and what they were called with."""

    world = 2

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [(rank, method, *mine) for rank, mine in enumerate(arguments)]

    async def any(self, method: str, *arguments: Any) -> Any:
        return (method, *arguments)


def test_a_part_of_a_gang_is_one_too() -> None:
    part = Part(Two(), "policy")
    assert part.world == 2
    assert asyncio.run(part.each("add", 5)) == [(rank, "do", "policy", "add", 5) for rank in range(2)]
    assert asyncio.run(part.any("add", 5)) == ("do", "policy", "add", 5)
    first, second = asyncio.run(part.split("add", Numbers(1, 2, 3), 7))
    assert (first[:4], first[4].numbers, first[5]) == ((0, "do", "policy", "add"), (1, 3), 7)
    assert (second[:4], second[4].numbers, second[5]) == ((1, "do", "policy", "add"), (2,), 7)


def test_the_workers_own_exception_reaches_the_caller() -> None:
    gang = LocalGang(Adder())
    with pytest.raises(ArithmeticError, match="must not be negative"):
        asyncio.run(gang.split("add", Numbers(1), -1))
    with pytest.raises(AttributeError):
        asyncio.run(gang.any("subtract"))


async def where(fail: bool = False) -> threading.Thread:
    await asyncio.sleep(0)
    if fail:
        raise ArithmeticError("no")
    return threading.current_thread()


def test_work_is_finished_here_or_beside_a_running_loop() -> None:
    async def cell() -> threading.Thread:
        return finished(where())

    assert finished(where()) is threading.current_thread()
    assert asyncio.run(cell()) is not threading.current_thread()


def test_errors_come_out_of_both() -> None:
    async def cell() -> threading.Thread:
        return finished(where(fail=True))

    for work in (lambda: finished(where(fail=True)), lambda: asyncio.run(cell())):
        with pytest.raises(ArithmeticError):
            work()


async def idle() -> None:
    await asyncio.sleep(60)


async def busy() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("work", [idle, busy])
def test_an_interrupt_beside_a_running_loop_ends_the_work(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A second Ctrl-C in a notebook: the run went on behind the user's back, with its folder free for another."""
    seen: list[str] = []

    async def noted() -> None:
        try:
            await work()
        finally:
            seen.append("ended")

    async def cell() -> None:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not asyncio's own
        threads = set(threading.enumerate())
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                finished(noted())
        finally:
            signal.signal(signal.SIGINT, before)
            timer.join()
        assert seen == ["ended"]
        assert not {thread for thread in threading.enumerate() if thread.is_alive()} - threads

    began = time.monotonic()
    asyncio.run(cell())
    assert time.monotonic() - began < 10


def test_background_work_is_one_task_that_starts_again_and_tells_how_it_went_wrong() -> None:
    done: list[int] = []
    ends: list[BaseException | None] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(len(done))
        if len(done) == 3:
            raise ArithmeticError("three")
        if len(done) == 4:
            await asyncio.sleep(60)

    async def cell() -> None:
        background = Background(work, ends.append)
        for _ in range(4):
            background.wake()
            background.wake()  # it runs already
            for _ in range(5):
                await asyncio.sleep(0)
        asyncio.all_tasks().difference({asyncio.current_task()}).pop().cancel()  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(cell())
    assert done == [0, 1, 2, 3]
    error, cancelled = ends
    assert isinstance(error, ArithmeticError)
    assert cancelled is None


def test_several_at_once_give_their_results_in_order_or_the_first_failure_itself() -> None:
    ended: list[str] = []

    async def one(name: str, seconds: float, fails: bool = False) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)
        if fails:
            raise ArithmeticError(name)
        return name

    assert finished(together([one("slow", 0.02), one("fast", 0.0)])) == ["slow", "fast"]
    assert ended == ["fast", "slow"]
    with pytest.raises(ArithmeticError, match="first"):
        finished(together([one("long", 60.0), one("first", 0.0, fails=True), one("second", 0.05, fails=True)]))
    assert sorted(ended[2:]) == ["first", "long", "second"], "the others are cancelled, and have ended"
