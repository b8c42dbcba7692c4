"""Places that are filled again, with workers that are lost at a word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from plaudit.runtime.supervisor import LONGEST_PAUSE, NODES, Supervisor
from plaudit.runtime.worker import NodeLost, NoWorkersError, Worker, WorkerLost


class Idle:
    """A worker whom nobody asks anything."""

    def __init__(self, number: int):
        self.name, self.ended = f"clerk {number}", asyncio.Event()

    async def call(self, method: Any, *arguments: Any) -> Any:
        raise NotImplementedError

    async def gone(self) -> WorkerLost:
        await self.ended.wait()
        return WorkerLost(self.name, "its process ended")

    def kill(self, reason: str = "was ended") -> None:
        self.ended.set()


class Case:
    """Places, and what was started and said. The first starts fail as `fails` has it, where it has no None."""

    def __init__(
        self,
        count: int,
        *,
        most: int = 0,
        patience: float = 99.0,
        fails: list[Exception | None] | None = None,
        allowed: int = 99,
    ):
        self.started: list[Idle] = []
        self.said: list[str] = []
        self.failures: list[WorkerLost] = []
        self.fails, self.allowed, self.starts = fails or [], allowed, list[int]()
        self.supervisor = Supervisor(
            self._start,
            count,
            most=most,
            work="questions",
            patience=patience,
            none="nobody for {patience:g} s",
            failures=self._failed,
            say=self.said.append,
        )

    async def _start(self, number: int) -> Idle:
        self.starts.append(number)
        await asyncio.sleep(0.01)
        if self.fails and (failure := self.fails.pop(0)) is not None:
            raise failure
        self.started.append(Idle(number))
        return self.started[-1]

    def _failed(self, lost: WorkerLost) -> None:
        self.failures.append(lost)
        if len(self.failures) > self.allowed:
            raise RuntimeError("too many")


def do(test: Callable[[Case], Awaitable[None]], count: int, **more: Any) -> None:
    async def whole() -> None:
        case = Case(count, **more)
        case.supervisor.open()
        await test(case)
        case.supervisor.close("the places were")

    asyncio.run(whole())


def test_a_loss_that_no_call_finds_is_found_and_counts_once() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        assert case.said == []
        case.started[0].kill()
        while len(case.started) < 3:
            await asyncio.sleep(0.01)
        await case.supervisor.counted()
        assert [worker.name for worker in case.supervisor.workers] == ["clerk 0", "clerk 1"]
        assert case.said == [
            "lost clerk 0: its process ended; its questions are asked again",
            "clerk 0 is ready",
        ]
        assert (len(case.failures), case.supervisor.lost) == (1, 1)

    do(steps, 2)


def test_who_opens_again_starts_nobody_twice() -> None:
    async def steps(case: Case) -> None:
        case.supervisor.open()
        await case.supervisor.counted()
        await asyncio.sleep(0.03)
        assert case.starts == [0, 1]

    do(steps, 2)


def test_the_last_of_those_named_gives_way_while_others_are_left() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        assert case.supervisor.give_way({"nobody"}) is None
        assert case.supervisor.give_way({"clerk 0", "clerk 1"}) == 1
        assert case.supervisor.give_way() == 2  # the place of the other has nobody now
        assert [worker.name for worker in case.supervisor.workers] == ["clerk 0"]
        assert case.supervisor.give_way() is None
        await case.supervisor.counted()
        assert case.failures == []
        assert sorted(case.starts) == [0, 1, 1, 2, 2]

    do(steps, 3)


def test_closed_places_end_what_is_under_way_and_the_first_reason_is_told() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        case.started[0].kill()
        while not case.failures:
            await asyncio.sleep(0)
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        assert under_way  # another start, and somebody who watches the other worker
        case.supervisor.close("the places were")
        case.supervisor.close("again they were")
        await asyncio.wait(under_way, timeout=1.0)
        assert all(task.done() for task in under_way)
        assert len(case.started) == 2
        with pytest.raises(RuntimeError, match="places were closed"):
            case.supervisor.check()

    do(steps, 2)


def test_many_who_notice_a_loss_lose_one() -> None:
    async def steps(case: Case) -> None:
        (place,) = await case.supervisor.free()
        worker = place.worker
        assert worker is not None
        worker.kill()
        for _ in range(3):
            case.supervisor.lose(place, worker, WorkerLost(worker.name, "noticed by a call"))
        await case.supervisor.counted()
        await asyncio.sleep(0.03)
        assert case.starts == [0, 0]
        assert [lost.reason for lost in case.failures] == ["noticed by a call"]

    do(steps, 1)


def test_a_worker_that_is_lost_before_all_are_told_that_it_is_ready_is_replaced_once() -> None:
    async def steps(case: Case) -> None:
        (place,) = case.supervisor.all
        async with case.supervisor._changed:  # so that who fills the place waits to tell
            while place.worker is None:
                await asyncio.sleep(0)
            case.supervisor.lose(place, place.worker, WorkerLost("clerk 0", "killed"))
        await case.supervisor.counted()
        await asyncio.sleep(0.03)
        assert case.starts == [0, 0]

    do(steps, 1)


def test_a_node_that_is_lost_during_a_start_is_no_failure_and_a_worker_is() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        assert case.starts == [0, 0, 0]
        assert [str(lost) for lost in case.failures] == ["clerk 0: died"]
        assert case.said == ["lost clerk 0: died", "clerk 0 is ready"]

    do(steps, 1, fails=[NodeLost("clerk 0", "its node is gone"), WorkerLost("clerk 0", "died")])


@pytest.mark.slow
def test_nodes_that_come_and_go_are_failures_in_the_end() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        assert [str(lost) for lost in case.failures] == ["clerk 0: died", *["clerk 0: gone"] * 2]

    gone = NodeLost("clerk 0", "gone")
    do(steps, 1, fails=[gone, WorkerLost("clerk 0", "died"), *[gone] * (NODES + 2)])


def test_those_beyond_the_count_fail_nobody_and_wait_longer_each_time() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        while len(case.started) < 2:
            await asyncio.sleep(0.01)
        beyond = case.supervisor.all[1]

        def lose() -> float:
            beyond.worker = Idle(1)
            case.supervisor.lose(beyond, beyond.worker, WorkerLost("clerk 1", "its node is gone"))
            return beyond.pause

        assert [lose() for _ in range(3)] == [1.0, 2.0, 4.0]
        beyond.since = asyncio.get_running_loop().time() - LONGEST_PAUSE - 1.0  # it stayed for a while
        assert [lose() for _ in range(2)] == [1.0, 2.0]
        assert case.failures == []
        assert case.supervisor.lost == 5

    do(steps, 1, most=2)


@pytest.mark.slow
def test_one_beyond_the_count_that_cannot_start_ends_nothing_and_is_tried_again() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        while len(case.supervisor.workers) < 2:
            await asyncio.sleep(0.01)
        assert case.starts == [0, 1, 1]
        assert case.said == [
            "a worker that would join did not start: FileNotFoundError: no model on this node",
            "clerk 1 is ready",
        ]
        assert case.failures == []

    do(steps, 1, most=2, fails=[None, FileNotFoundError("no model on this node")])


@pytest.mark.parametrize(
    ("fails", "allowed", "error"),
    [([FileNotFoundError("no clerk")], 9, FileNotFoundError), ([WorkerLost("clerk 0", "died")] * 3, 2, RuntimeError)],
)
def test_what_ends_all_is_told_to_who_waits(fails: list[Exception], allowed: int, error: type[Exception]) -> None:
    async def steps(case: Case) -> None:
        for wait in (case.supervisor.counted(), case.supervisor.free()):
            with pytest.raises(error, match=r"no clerk|too many"):
                await wait
        assert len(case.starts) == len(fails)

    do(steps, 1, fails=[*fails], allowed=allowed)


def test_the_least_busy_is_first_and_none_is_waited_for_no_longer_than_may_be() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        case.supervisor.all[0].load, case.supervisor.all[2].load = 2, 1
        assert [place.number for place in await case.supervisor.free()] == [1, 2, 0]
        for place in case.supervisor.all:
            place.worker = None
        with pytest.raises(NoWorkersError, match=r"0\.05 s"):
            await case.supervisor.free()

    do(steps, 3, patience=0.05)


def test_the_next_is_asked_for_one_that_is_lost() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        asked: list[str] = []

        async def ask(worker: Worker[Any]) -> str:
            asked.append(worker.name)
            if len(asked) < 3:
                raise WorkerLost(worker.name, "its process ended")
            return "answer"

        assert await case.supervisor.asked(1, ask, first=case.supervisor.all[1]) == "answer"
        assert asked[0] == "clerk 1"
        assert len(case.failures) == 2
        assert [place.load for place in case.supervisor.all] == [0, 0]

    do(steps, 2)


def test_those_that_end_because_all_is_closed_are_no_loss() -> None:
    async def steps(case: Case) -> None:
        await case.supervisor.counted()
        case.supervisor.close("the clerks were")
        case.started[0].kill()
        await asyncio.sleep(0.03)
        assert (case.failures, case.starts) == ([], [0])
        with pytest.raises(RuntimeError, match="clerks were closed"):
            await case.supervisor.free()

    do(steps, 1)


def test_who_waits_for_a_place_is_told_that_all_is_closed() -> None:
    async def steps(case: Case) -> None:
        waits = [asyncio.ensure_future(wait) for wait in (case.supervisor.counted(), case.supervisor.free())]
        await asyncio.sleep(0)
        case.supervisor.close("the clerks were")
        for ended in await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 9.0):
            assert str(ended) == "the clerks were closed"
        assert case.started == []

    do(steps, 1)


def test_the_least_busy_of_many_is_asked() -> None:
    """Requests of many costs that end in any order: the one who is asked is always first in `free`."""
    case, draw = Case(9), random.Random(0)

    async def steps() -> None:
        case.supervisor.open()
        await case.supervisor.counted()
        ends = [asyncio.Event() for _ in range(300)]

        async def ask(worker: Worker[Any], number: int) -> None:
            await ends[number].wait()

        running = []
        for number in range(300):
            (least, *_) = await case.supervisor.free()
            assert case.supervisor._least() is least
            cost = draw.randint(1, 50)
            running.append(asyncio.ensure_future(case.supervisor.asked(cost, partial(ask, number=number))))
            await asyncio.sleep(0)
            assert least.load >= cost
            ends[draw.randrange(number + 1)].set()
            await asyncio.sleep(0)
            if number == 150:
                case.started[3].kill()
                await asyncio.sleep(0.01)
        for end in ends:
            end.set()
        await asyncio.gather(*running)
        assert [place.load for place in case.supervisor.all] == [0] * 9

    asyncio.run(steps())
