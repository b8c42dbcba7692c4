import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plaudit import load_settings
from plaudit.rewards.judge import JudgeReward, Tokens
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.workers import TRIES, FunctionProcess, FunctionWorkers, JudgeWorkers, Scores
from plaudit.runtime.worker import AnswersLost, NoWorkersError, WorkerLost
from plaudit.support import plugins
from plaudit.types import Completion, Finish, Prompt
from plaudit.types.distant import Distant, values


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


class Answers:
    """A source of this process."""

    def __init__(self, number: int):
        self.number = number

    def all(self, sources: Sequence[Any]) -> list[Any]:
        return [{"tokens": np.array([one.number, 2])} for one in sources]


class WorkerGroup(SumWorker):
    """A judge of two processes, of which each lacks the answers of another node, and none may lack any in a pass."""

    def __init__(self) -> None:
        super().__init__("judge")
        self.asked = list[str]()
        self.processes = (self, SimpleNamespace(call=self.second))

    async def call(self, method: Any, *arguments: Any) -> Any:
        self.asked.append(method.__name__)
        if method is Scores.pin:
            return self.lacking(arguments[0], 3)
        if method is Scores.of_distant:
            return [float(sum(one)) for one in values(arguments[0])]
        return await super().call(method, *arguments)

    async def second(self, method: Any, sources: Any) -> list[int]:
        assert method is Scores.pin
        return self.lacking(sources, 5)

    def lacking(self, sources: Any, lost: int) -> list[int]:
        return [number for number, source in enumerate(sources) if source.number == lost]


def test_a_lost_answer_fails_whoever_asked_about_it_and_nobody_else() -> None:
    """Two answers each to prompts 3 to 6. Each process of the judge lacks another prompt's, and none is blamed."""
    lost, judge = list[WorkerLost](), WorkerGroup()

    async def start(number: int) -> Any:
        return judge

    def asked(number: int) -> list[Tokens]:
        source = Answers(number)
        distant: list[Any] = [Distant("tokens", 0, 2, source, before=(1,)), Distant("tokens", 1, 2, source)]
        return distant

    async def run() -> list[Any]:
        judges = JudgeWorkers(start, 1, patience=9.0, failures=lost.append)
        reward = JudgeReward(judges)
        found = await asyncio.gather(*(reward.scored(asked(n)) for n in range(3, 7)), return_exceptions=True)
        assert await judges(asked(3)) == [None, None]
        judges.close()
        return found

    third, fourth, fifth, sixth = asyncio.run(run())
    assert isinstance(third, AnswersLost) and isinstance(fifth, AnswersLost)
    assert [score.value for score in fourth] == [7.0, 2.0] and [score.value for score in sixth] == [9.0, 2.0]
    assert judge.asked == ["pin", "of_distant", "pin"] and not lost


def test_workers_need_a_runtime_with_processes(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    recipe = make_recipe("grpo", tmp_path) | {"rewards": [{"kind": "judge", "path": "judge", "workers": 2}]}
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 .*runtime=ray"):
        load_settings(recipe)
    assert load_settings(recipe, ["runtime=ray"]).rewards[0].workers == 2
    recipe["rewards"] = [{"kind": "length", "options": {"target": 3}, "workers": 2}]
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 .*runtime=ray"):
        load_settings(recipe)
    assert load_settings(recipe, ["runtime=ray"]).rewards[0].workers == 2
    recipe["rewards"] = [{"kind": "http", "urls": ["http://127.0.0.1:1"], "workers": 2}]
    with pytest.raises(ValueError, match=r"rewards\.0\.workers=2 .*'judge'"):
        load_settings(recipe)


PROMPT = Prompt(id="f:1", text="how many?", tokens=(1, 2))


def answer(text: str) -> Completion:
    return Completion(tokens=(3,), logprobs=(-1.0,), versions=(0,), text=text, finish=Finish.EOS)


def numbers(completion: str) -> float | None:
    """As the answer says."""
    return float(completion) if completion else None


class NumberWorker:
    """A process that ends when it is asked about a fatal answer."""

    def __init__(self, name: str, fatal: str = ""):
        self.name, self.fatal, self.under_way, self.most = name, fatal, 0, 0
        self.calls = list[int]()
        self.process = FunctionProcess(RewardSettings(kind="function", function=f"{__file__}:numbers"), (), {})

    async def call(self, method: Any, asked: Any) -> Any:
        assert method is FunctionProcess.scores
        self.calls.append(len(asked))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        if self.fatal in [one.text for _, one in asked]:
            raise WorkerLost(self.name, "a fault of the native library")
        assert all(not one.logprobs for _, one in asked), "no function sees them"
        return await method(self.process, asked)

    async def gone(self) -> WorkerLost:
        return await asyncio.get_running_loop().create_future()

    def kill(self, reason: str = "was ended") -> None: ...


def function_workers(start: Any, count: int, **how: Any) -> FunctionWorkers:
    how = {"waits": False, "tokens": True, "deadline": 60.0, "patience": 9.0, "failures": lambda lost: None} | how
    workers = FunctionWorkers(start, count, **how)
    workers.open()
    return workers


@pytest.mark.parametrize(("waits", "most"), [(False, 1), (True, 9)])
def test_functions_answer_in_order_and_those_that_wait_have_many_calls(waits: bool, most: int) -> None:
    started: list[NumberWorker] = []

    async def start(number: int) -> NumberWorker:
        started.append(NumberWorker(f"function {number}", fatal="none"))
        return started[-1]

    async def run() -> None:
        workers = function_workers(start, 2, waits=waits)
        groups = [[str(10 * group + n) for n in range(4)] for group in range(18)]
        found = [asyncio.create_task(workers.score(PROMPT, list(map(answer, group)))) for group in groups]
        assert [[score.value for score in await one] for one in found] == [list(map(float, one)) for one in groups]
        (none,) = await workers.score(PROMPT, [answer("")])
        assert not none.applicable
        (failed,) = await workers.score(PROMPT, [answer("many")])
        assert str(failed.reason).startswith("ValueError: could not convert")
        assert f"({Path(__file__).name}, line {numbers.__code__.co_firstlineno + 2})" in str(failed.reason)

    asyncio.run(run())
    assert len(started) == 2
    assert all(0 < worker.most <= most for worker in started)
    assert waits or sum(len(worker.calls) for worker in started) < 12, "what waits goes together"


def test_an_answer_that_ends_its_process_fails_and_no_other() -> None:
    lost: list[WorkerLost] = []

    async def start(number: int) -> NumberWorker:
        return NumberWorker(f"function {number}", fatal="13")

    async def run() -> None:
        workers = function_workers(start, 2, failures=lost.append)
        found = await asyncio.gather(*(workers.score(PROMPT, [answer(str(n))]) for n in range(20)))
        assert [score.value for (score,) in found] == [float(n) if n != 13 else None for n in range(20)]
        (fatal,) = found[13]
        assert "fault of the native" in str(fatal.reason)
        assert fatal.failed

    asyncio.run(run())
    assert len(lost) == TRIES


def test_a_function_that_does_not_load_is_told_when_all_should_be_ready() -> None:
    async def start(number: int) -> NumberWorker:
        raise ImportError("no module of that name here")

    async def run() -> None:
        with pytest.raises(ImportError, match="no module"):
            await function_workers(start, 2).ready()

    asyncio.run(run())


def test_a_process_that_starts_late_calls_the_function_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completion): return 1.0")
    reward = RewardSettings(kind="function", function=f"{file}:reward")
    FunctionProcess(reward, (), {})
    make = FunctionProcess.maker(reward, ())
    file.write_text("def reward(completion): return 2.0")
    for _ in range(2):  # as where another process, or a node without the file, begins
        monkeypatch.setattr(plugins, "_SENT", {})
        assert [score.value for score in asyncio.run(make().scores([(PROMPT, answer("x"))]))] == [1.0]
        file.unlink(missing_ok=True)
