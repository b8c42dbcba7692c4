"""What an executor does without its workers. Whole runs are `test_ray_runs.py`."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from plaudit.environments.settings import EnvironmentSettings
from plaudit.executors import scoring as scoring_module
from plaudit.executors.generation import Apart, Sharing
from plaudit.executors.local import LocalExecutor
from plaudit.executors.mirrors import Mirrors
from plaudit.executors.ranks import RankGroups, rank_groups
from plaudit.executors.ray import RayExecutor
from plaudit.executors.scoring import Scoring
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.settings import RewardSettings
from plaudit.runtime.local import LocalWorkerGroup
from plaudit.runtime.resources import Resources
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.worker import Failures, WorkerLost
from plaudit.settings.tree import Settings
from plaudit.types import Completion, Finish, Prompt, Role


def ranks_of(rank: Any) -> RankGroups:
    """A worker group of one that trains everything."""
    runtime: Any = SimpleNamespace(nodes=lambda: [{}], reserve=lambda bundles: None)
    ranks: Any = RankGroups(Settings(), runtime, len)
    worker_group: Any = LocalWorkerGroup(rank)
    worker_group.workers, worker_group.first = [], None
    ranks.worker_groups, ranks.bundles = [worker_group], [{}]
    return ranks


@pytest.mark.parametrize(
    ("shares", "engine", "expected"),
    [
        (True, "vllm", ["ranks start", "ranks rest", "workers start", "workers are there"]),
        (False, "vllm", ["ranks start", "workers start", "ranks rest", "workers are there"]),
        (True, "native", ["ranks start", "workers start", "ranks rest", "workers are there"]),
    ],
)
def test_vllm_starts_on_ranks_devices_when_they_rest(shares: bool, engine: str, expected: list[str]) -> None:
    """It measures free memory, which is the ranks' to take and leave until then."""
    seen: list[str] = []

    async def starting(first: str, last: str) -> None:
        seen.append(first)
        await asyncio.sleep(0)
        seen.append(last)

    executor: Any = object.__new__(RayExecutor)
    runtime = SimpleNamespace(weights="store", rollout_width=1)
    rollout = SimpleNamespace(engine=engine, max_lag=0)
    executor.settings = SimpleNamespace(device="cpu", threads=None, runtime=runtime, rollout=rollout, rewards=())
    nodes = [{"CPU": 2.0, "object_store_memory": float(100 << 20)}]
    executor.runtime = SimpleNamespace(
        nodes_for=lambda bundles, what: nullcontext(), reserve=lambda bundles: None, nodes=lambda: nodes
    )
    executor.ranks = ranks_of(SimpleNamespace(packed_bytes=lambda: (50 << 20) + 1))
    executor.generation = generation = object.__new__(Sharing if shares else Apart)
    generation.count, generation.exact, generation.vllm, generation.settings = 1, False, engine == "vllm", Settings()
    generation.pool = SimpleNamespace(open=lambda: starting("workers start", "workers are there"))
    settings: Any = SimpleNamespace(rewards=[], samples=True, runtime=SimpleNamespace(start_timeout=1.0))
    settings.environment, settings.reserving = EnvironmentSettings(), []
    executor.placed = executor.settings
    executor.scoring = Scoring(settings, executor.runtime, {}, executor._room, failures=Failures(0), say=print)
    said: list[str] = []
    executor.threads, executor.say = 1, said.append
    executor._form = lambda: starting("ranks start", "ranks rest")
    executor.mirrors = Mirrors(executor.runtime, executor.ranks, 0, said.append)
    asyncio.run(executor._open())
    assert seen == expected
    assert [text[:32] for text in said] == ["1 training and 1 rollout workers", "an object store of 100 MiB has n"]


def test_a_rank_that_is_lost_while_nobody_asks_it_ends_what_the_run_does() -> None:
    """Rollout workers may be waiting for its weights, and the run for them."""
    lost = WorkerLost("training rank 1", "its process ended")
    ended: list[str] = []

    def executor_of(*gone: asyncio.Future[WorkerLost]) -> Any:
        executor: Any = object.__new__(RayExecutor)
        worker_group: Any = SimpleNamespace(
            workers=[SimpleNamespace(gone=partial(asyncio.wait_for, one, None)) for one in gone]
        )
        executor.ranks, executor.say = RankGroups(Settings(), Any, len), print  # type: ignore[arg-type]
        executor.ranks.worker_groups = [worker_group]
        return executor

    async def work(seconds: float, error: Exception | None = None) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(0)
            ended.append("work")
        if error is not None:
            raise error
        return "done"

    async def steps() -> None:
        loop = asyncio.get_running_loop()
        assert await executor_of(loop.create_future()).watched(work(0.0)) == "done"
        with pytest.raises(ArithmeticError):
            await executor_of(loop.create_future()).watched(work(0.0, ArithmeticError()))
        assert len(ended) == 2
        gone = loop.create_future()
        loop.call_later(0.05, gone.set_result, lost)
        with pytest.raises(WorkerLost, match="training rank 1"):
            async with asyncio.timeout(20):
                await executor_of(loop.create_future(), gone).watched(work(60.0))
        assert len(ended) == 3, "it was cancelled and has ended"

    asyncio.run(steps())


def test_judges_begin_to_start_before_they_are_asked_anything() -> None:
    reward = RewardSettings(kind="judge", path="judge", workers=2)
    begun: list[str] = []

    async def room(name: str, key: tuple[str, int], bundle: Resources) -> Any:
        begun.append(name)
        await asyncio.Event().wait()

    runtime: Any = None
    settings = Settings(rewards=[reward], algorithm=SimpleNamespace(online=True))
    scoring = Scoring(settings, runtime, {"CPU": 1.0}, room, failures=Failures(0), say=print)
    assert scoring.bundles == [{"CPU": 1.0}] * 2

    async def first_answers() -> None:
        scoring.open()
        judges = scoring.judges(reward)
        assert scoring.judges(reward) is judges  # as where ranks are formed again
        for _ in range(5):
            await asyncio.sleep(0)
        judges.close()

    asyncio.run(first_answers())
    assert begun == ["judge 0 (judge)", "judge 1 (judge)"]


@pytest.mark.slow
def test_a_function_that_keeps_the_driver_from_its_work_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_module, "HELD", 0.5)
    said: list[str] = []
    settings = [RewardSettings(kind="function", name=name) for name in ("quick", "slow")]

    async def room(name: str, key: tuple[str, int], bundle: Resources) -> Any:
        raise AssertionError("none has a process")

    runtime: Any = None
    everything = Settings(rewards=settings, algorithm=SimpleNamespace(online=True))
    scoring = Scoring(everything, runtime, {}, room, failures=Failures(0), say=said.append)
    prompt = Prompt(id="p", text="", tokens=(1,))
    answer = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text="", finish=Finish.EOS)

    async def steps() -> None:
        for reward in settings:
            here = FunctionReward(lambda text, took=0.2 * (reward.name == "slow"): time.sleep(took), name=reward.name)
            told = scoring.function(reward, here)
            for _ in range(3):
                assert await told.score(prompt, [answer]) == await here.score(prompt, [answer])

    asyncio.run(steps())
    (one,) = said
    assert "slow" in one
    assert "rewards.1.workers=1" in one


def test_each_model_is_on_the_ranks_that_the_placement_names() -> None:
    runtime = RuntimeSettings(
        kind="ray",
        mesh={"tensor": 2},
        placement={"critic": {"workers": 3, "resources": {"CPU": 2}}, "reference": {"inside": "critic"}},
    )
    training, critic = rank_groups(Settings(runtime=runtime))
    assert (training.name, training.roles, training.runtime.ranks) == ("training", (Role.POLICY, Role.JUDGE), 2)
    assert (critic.name, critic.roles, critic.runtime.ranks) == ("critic", (Role.REFERENCE, Role.CRITIC), 3)
    assert critic.reservations == [{"CPU": 2}] * 3
    [together] = rank_groups(Settings(runtime=RuntimeSettings(placement={"generate": {"shares": "train"}})))
    assert together.roles == tuple(Role)


@pytest.mark.parametrize("place", ["local", "ray"])
@pytest.mark.parametrize("as_chat", [None, True, False])
def test_a_judge_reads_prompts_as_the_run_sends_them(
    place: str, as_chat: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is set, its checkpoint decides. On Ray it scores beside the driver's other work."""
    asked: list[Any] = []
    judge = SimpleNamespace(reward=lambda tokenizer, **more: asked.append((more["as_chat"], more.get("thread", False))))
    kinds: dict[str, Any] = {"local": LocalExecutor, "ray": RayExecutor}
    monkeypatch.setattr(f"plaudit.executors.{place}.load_judge", lambda settings, path: judge)
    executor = object.__new__(kinds[place])
    reward = RewardSettings(kind="judge", path="judge")
    executor.settings, executor.engine = Settings(rewards=[reward]), SimpleNamespace(busy=False)
    executor.settings.data.as_chat, executor.placed = as_chat, executor.settings
    executor.judge(reward, None)
    assert asked == [(as_chat, place == "ray")]
