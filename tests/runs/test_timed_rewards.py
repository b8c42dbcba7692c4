"""When a run's rewards count as at work, beside an engine in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from plaudit import load_settings
from plaudit.algorithms import GRPO
from plaudit.executors.base import Executor
from plaudit.rewards.base import Reward
from plaudit.rewards.judge import JudgeReward
from plaudit.rewards.settings import RewardSettings
from plaudit.runs.assemble import Job
from plaudit.runtime.worker import Doing
from plaudit.types import Completion, Finish, Prompt

Recipe = Callable[..., dict[str, Any]]


class Blank:
    """An executor whose functions are called here, and whose judge scores once the engine is idle."""

    def __init__(self) -> None:
        self.busy = True

    def sampler(self, doing: Doing) -> Any: ...

    def function(self, reward: RewardSettings, here: Reward) -> Reward:
        return here

    def environment(self) -> None: ...

    def judge(self, reward: RewardSettings, tokenizer: Any) -> JudgeReward:
        return JudgeReward(lambda sequences: [1.0] * len(sequences), busy=lambda: self.busy)


@pytest.mark.slow
def test_rewards_count_while_they_compute_not_while_they_wait(make_recipe: Recipe, judge: Path, tmp_path: Path) -> None:
    """Beside an engine that takes a turn of the event loop for each token, as in one process."""
    rewards = [*make_recipe("grpo", tmp_path)["rewards"], {"kind": "judge", "path": str(judge)}]
    settings = load_settings(make_recipe("grpo", tmp_path, rewards=rewards))
    job, executor, seen = Job.trial(settings, tmp_path), Blank(), list[str]()

    @contextmanager
    def doing(worker: str, phase: str) -> Iterator[None]:
        seen.append(f"{worker} {phase}")
        yield
        seen.append("done")

    job.events.doing = doing  # type: ignore[method-assign]

    async def run() -> None:
        answer = Completion(tokens=(2,), logprobs=(0.0,), versions=(0,), text="2", finish=Finish.EOS)
        reward = job.rollouts(cast(Executor, executor), GRPO(), []).rollouter.reward
        asked = reward.score(Prompt(id="p", text="1", tokens=(1,)), [answer])
        scores = asyncio.create_task(asked)
        for _ in range(9):
            seen.append("engine")
            await asyncio.sleep(0)
        executor.busy = False
        await scores

    asyncio.run(run())
    assert "".join(one[0] for one in seen) == "eerd" + 7 * "e" + "rd", "no turn of the engine while a reward counts"
