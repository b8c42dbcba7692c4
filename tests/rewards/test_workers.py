import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit import load_settings
from plaudit.rewards.judge import Tokens
from plaudit.rewards.workers import JudgeWorkers, Scores
from plaudit.runtime.worker import NodeLost, NoWorkersError, WorkerLost


class SumWorker:
    """Scores a sequence with its sum; dies at its `last` call."""

    def __init__(self, name: str, last: int = 0):
        self.name, self.last, self.calls = name, last, list[int]()

    async def call(self, method: Any, *arguments: Any) -> list[float]:
        (sequences,) = arguments
        assert method is Scores.of_sequences
        self.calls.append(len(sequences))
        await asyncio.sleep(0)
        if len(self.calls) == self.last:
            raise WorkerLost(self.name, "killed")
        return [float(sum(sequence)) for sequence in sequences]

    async def gone(self) -> WorkerLost:
        return await asyncio.get_running_loop().create_future()

    def kill(self, reason: str = "was ended") -> None: ...


SEQUENCES: list[Tokens] = [(n, 1) for n in range(7)]


def test_a_call_is_spread_and_answered_in_order() -> None:
    started: list[SumWorker] = []

    async def start(number: int) -> SumWorker:
        started.append(SumWorker(f"judge {number}"))
        return started[-1]

    async def run() -> None:
        judges = JudgeWorkers(start, 3, patience=9.0, failures=lambda lost: None)
        for _ in range(2):
            assert await judges(SEQUENCES) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert await judges(SEQUENCES[:1]) == [1.0]

    asyncio.run(run())
    assert [worker.calls for worker in started] == [[3, 3, 1], [2, 2], [2, 2]]


def test_a_lost_worker_is_replaced_until_it_is_too_much() -> None:
    lost: list[str] = []

    async def start(number: int) -> SumWorker:
        return SumWorker(f"judge {number}", last=1 if len(lost) < 2 else 0)

    def fails(error: WorkerLost) -> None:
        lost.append(error.name)
        if len(lost) > 2:
            raise RuntimeError("too many")

    async def run() -> None:
        assert await JudgeWorkers(start, 1, patience=9.0, failures=fails)(SEQUENCES) == [float(n + 1) for n in range(7)]
        assert lost == ["judge 0"] * 2
        lost.clear()
        always = JudgeWorkers(dies, 1, patience=9.0, failures=fails)
        with pytest.raises(RuntimeError, match="too many"):
            await always(SEQUENCES)

    async def dies(number: int) -> SumWorker:
        return SumWorker("judge", last=1)

    asyncio.run(run())


def test_a_node_that_is_lost_during_a_start_is_no_failure() -> None:
    starts: list[int] = []

    async def start(number: int) -> SumWorker:
        starts.append(number)
        if len(starts) < 3:
            raise NodeLost(f"judge {number}", "its node is gone")
        return SumWorker(f"judge {number}")

    def fails(lost: WorkerLost) -> None:
        raise RuntimeError("too many")

    async def run() -> None:
        assert await JudgeWorkers(start, 1, patience=9.0, failures=fails)(SEQUENCES[:2]) == [1.0, 2.0]

    asyncio.run(run())
    assert starts == [0, 0, 0], "until it is there, and not beyond"


def test_workers_that_end_because_all_is_closed_are_no_loss() -> None:
    lost: list[WorkerLost] = []
    begun: list[int] = []

    async def start(number: int) -> SumWorker:
        begun.append(number)
        return SumWorker(f"judge {number}", last=2)

    async def run() -> None:
        judges = JudgeWorkers(start, 1, patience=9.0, failures=lost.append)
        await judges(SEQUENCES)
        asked = asyncio.create_task(judges(SEQUENCES))
        await asyncio.sleep(0)  # it asks
        judges.close()
        with pytest.raises(RuntimeError, match="closed"):
            await asked

    asyncio.run(run())
    assert (lost, begun) == ([], [0])


def test_the_others_answer_for_a_lost_worker_until_another_one_is_ready() -> None:
    room = asyncio.Event()
    started: list[SumWorker] = []

    async def start(number: int) -> SumWorker:
        if len(started) >= 3:
            await room.wait()
        started.append(SumWorker(f"judge {number}", last=2 if len(started) == 1 else 0))
        return started[-1]

    async def run() -> None:
        judges = JudgeWorkers(start, 3, patience=9.0, failures=lambda lost: None)
        for _ in range(3):
            assert await judges(SEQUENCES) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert len(started) == 3, "they did not wait for it"
        room.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await judges(SEQUENCES) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    asyncio.run(run())
    first, second, third, fourth = (worker.calls for worker in started)
    assert second == [2, 2], "one call, and the one at which it was killed"
    assert fourth == [2]
    assert (first, third) == ([3, 3, 2, 4, 3], [2, 2, 3, 2]), "its two are asked of one, then there are two"


def test_where_none_is_left_and_none_gets_ready_the_run_ends() -> None:
    async def start(number: int) -> SumWorker:
        if lost:
            await asyncio.sleep(60.0)
        return SumWorker("judge", last=1)

    lost: list[WorkerLost] = []

    async def run() -> None:
        judges = JudgeWorkers(start, 1, patience=0.05, failures=lost.append)
        with pytest.raises(NoWorkersError, match=r"0\.05 s.* runtime\.start_timeout"):
            await judges(SEQUENCES)
        judges.close()

    asyncio.run(run())


def test_what_makes_starting_impossible_is_told_to_whoever_asks() -> None:
    async def start(number: int) -> SumWorker:
        raise FileNotFoundError(f"no judge {number}")

    async def run() -> None:
        with pytest.raises(FileNotFoundError, match="no judge 0"):
            await JudgeWorkers(start, 2, patience=9.0, failures=lambda lost: None)(SEQUENCES)

    asyncio.run(run())


def test_workers_need_a_runtime_with_processes(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path) | {"rewards": [{"kind": "judge", "path": "judge", "workers": 2}]}
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 .*runtime=ray"):
        load_settings(recipe)
    assert load_settings(recipe, ["runtime=ray"]).rewards[0].workers == 2
    recipe["rewards"] = [{"kind": "length", "workers": 2}]
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 .*'judge'"):
        load_settings(recipe)
