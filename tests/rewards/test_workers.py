import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assent import load_settings
from assent.rewards.judge import Tokens
from assent.rewards.settings import RewardSettings
from assent.rewards.workers import JudgeWorkers
from assent.runtime.worker import WorkerLost


class SumWorker:
    """Scores a sequence with its sum; dies at its `last` call."""

    def __init__(self, name: str, last: int = 0):
        self.name, self.last, self.calls = name, last, list[int]()

    async def call(self, method: str, *arguments: Any) -> list[float]:
        (sequences,) = arguments
        assert method == "of_sequences"
        self.calls.append(len(sequences))
        await asyncio.sleep(0)
        if len(self.calls) == self.last:
            raise WorkerLost(self.name, "killed")
        return [float(sum(sequence)) for sequence in sequences]

    def kill(self) -> None: ...


SEQUENCES: list[Tokens] = [(n, 1) for n in range(7)]


def test_a_call_is_spread_and_answered_in_order() -> None:
    started: list[SumWorker] = []

    async def start(number: int) -> SumWorker:
        started.append(SumWorker(f"judge {number}"))
        return started[-1]

    async def run() -> None:
        judges = JudgeWorkers(start, 3, failures=lambda lost: None)
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
        assert await JudgeWorkers(start, 1, failures=fails)(SEQUENCES) == [float(n + 1) for n in range(7)]
        assert lost == ["judge 0"] * 2
        lost.clear()
        always = JudgeWorkers(dies, 1, failures=fails)
        with pytest.raises(RuntimeError, match="too many"):
            await always(SEQUENCES)

    async def dies(number: int) -> SumWorker:
        return SumWorker("judge", last=1)

    asyncio.run(run())


def test_workers_need_a_runtime_with_processes(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path) | {"rewards": [{"kind": "judge", "path": "judge", "workers": 2}]}
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 need processes: set runtime=ray"):
        load_settings(recipe)
    assert load_settings(recipe, ["runtime=ray"]).rewards[0].workers == 2
    with pytest.raises(ValueError, match="workers=2 is read for kind 'judge' only"):
        RewardSettings(kind="length", workers=2)
