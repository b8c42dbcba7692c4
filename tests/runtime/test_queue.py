"""Questions, their callers, and the tasks in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from plaudit.runtime.queue import Queue


@dataclass(eq=False)
class Number:
    value: int


def numbers(*values: int) -> list[Number]:
    return [Number(value) for value in values]


class Squares:
    """Answers at most two questions a turn, each with its square; `refuse` may raise instead."""

    def __init__(self, tasks: int = 1, refuse: Callable[[list[int]], None] = lambda values: None):
        self.withdrawn: list[int] = []
        self.failures: list[BaseException | None] = []
        self.taken: list[list[int]] = []
        self.refuse = refuse
        self.queue: Queue[Number, int] = Queue(
            self.work, tasks=tasks, withdrawn=lambda gone: self.withdrawn.extend(one.value for one in gone),
            failed=self.failures.append,
        )  # fmt: skip

    async def work(self) -> None:
        while taken := self.queue.take(2):
            self.taken.append([one.value for one in taken])
            await asyncio.sleep(0)
            self.refuse(self.taken[-1])
            for one in reversed(taken):
                self.queue.answer(one, one.value**2)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_answers_come_in_the_order_of_asking_and_calls_share_what_is_taken() -> None:
    squares = Squares()

    async def run() -> list[list[int]]:
        asked = [numbers(1, 2, 3), [], numbers(4), numbers(5)]
        return list(await asyncio.gather(*map(squares.queue.ask, asked)))

    assert asyncio.run(run()) == [[1, 4, 9], [], [16], [25]]
    assert asyncio.run(run()) == [[1, 4, 9], [], [16], [25]]  # in another event loop too
    assert squares.taken[:3] == [[1, 2], [3, 4], [5]]
    assert not squares.queue.busy


def test_several_tasks_take_at_once_and_no_more_than_there_are_questions() -> None:
    squares = Squares(tasks=3)

    async def run() -> int:
        asking = asyncio.ensure_future(squares.queue.ask(numbers(*range(8))))
        await turns(1)
        working = len(asyncio.all_tasks()) - 2
        await asking
        return working

    assert asyncio.run(run()) == 3
    assert squares.taken[:3] == [[0, 1], [2, 3], [4, 5]]


def test_one_that_gives_up_leaves_nothing_behind() -> None:
    squares = Squares()

    async def run() -> list[int]:
        gone = asyncio.ensure_future(squares.queue.ask(numbers(1, 2, 3)))
        stays = asyncio.ensure_future(squares.queue.ask(numbers(4)))
        await turns(2)
        assert (squares.queue.under_way, len(squares.queue.waiting)) == (2, 2)
        gone.cancel()
        return await stays

    assert asyncio.run(run()) == [16]
    assert 3 in squares.withdrawn
    assert squares.taken == [[1, 2], [4]]


def test_what_goes_wrong_reaches_everybody_and_the_next_are_answered() -> None:
    def refuse(values: list[int]) -> None:
        if 13 in values:
            raise ArithmeticError("thirteen")

    squares = Squares(refuse=refuse)

    async def run() -> list[Any]:
        asked = map(squares.queue.ask, (numbers(1, 2), numbers(13), numbers(3, 4, 5)))
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [*found, await squares.queue.ask(numbers(6))]

    first, *others, last = asyncio.run(run())
    assert (first, last) == ([1, 4], [36])
    assert [type(error) for error in others] == [ArithmeticError] * 2
    assert [type(error) for error in squares.failures] == [ArithmeticError]
    assert not squares.withdrawn


def test_a_task_that_is_cancelled_takes_its_callers_with_it() -> None:
    squares = Squares()

    async def run() -> None:
        asking = asyncio.ensure_future(squares.queue.ask(numbers(1)))
        await turns(2)
        for task in asyncio.all_tasks() - {asking, asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(run())
    assert squares.failures == [None]


def test_what_is_held_back_waits_and_what_is_under_way_ends() -> None:
    squares = Squares()

    async def run() -> None:
        early = asyncio.ensure_future(squares.queue.ask(numbers(1, 2, 3)))
        await turns(2)
        await squares.queue.drain()
        assert (squares.queue.under_way, squares.queue.open, squares.queue.busy) == (0, False, True)
        late = asyncio.ensure_future(squares.queue.ask(numbers(4)))
        await turns(5)
        assert squares.taken == [[1, 2]]
        squares.queue.go_on()
        assert await asyncio.gather(early, late) == [[1, 4, 9], [16]]

    asyncio.run(run())
    assert squares.taken == [[1, 2], [3, 4]]


def test_what_is_put_back_comes_in_the_order_of_asking() -> None:
    squares = Squares()

    async def run() -> list[int]:
        asking = asyncio.ensure_future(squares.queue.ask(numbers(1, 2, 3)))
        await turns(2)
        assert [one.value for one in squares.queue.again()] == [1, 2, 3]
        return await asking

    assert asyncio.run(run()) == [1, 4, 9]
    assert squares.taken[0] == [1, 2]
