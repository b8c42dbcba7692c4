"""Answers that are lost with a node, before they are scored or before ranks hold them, are drawn again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from plaudit.algorithms import GRPO
from plaudit.data.cursor import Cursor
from plaudit.loop.redraw import TRIES, LastingRollouter, LastingSource
from plaudit.rewards.settings import ShapingSettings
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Completion, Finish, Group, Prompt, Sampling, Score

PROMPTS = [Prompt(id=str(n), text="", tokens=(n,)) for n in range(6)]
GONE = AnswersLost("answers on a node", "its node is gone")


class Engine:
    """Answers a prompt with its number of the time that it is asked, and notes the seeds."""

    def __init__(self) -> None:
        self.seeds: dict[int, list[tuple[int | None, ...]]] = {}

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        asked = self.seeds.setdefault(prompt_tokens[0], [])
        asked.append(tuple(sampling.seed for sampling in plan))
        tokens = (len(asked), 9)
        return [
            Completion(tokens=tokens, logprobs=(-1.0, -1.0), versions=(0, 0), text="", finish=Finish.EOS) for _ in plan
        ]


class Rewards:
    """Scores 0, 1, ...; the first `fails` calls find that the answers are lost."""

    def __init__(self, fails: int = 0):
        self.fails = fails

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self.fails:
            self.fails -= 1
            raise GONE
        return [Score(value=float(number)) for number in range(len(completions))]


def rollouter(rewards: Rewards) -> LastingRollouter:
    return LastingRollouter(Engine(), rewards, ShapingSettings(), [Sampling(), Sampling()], seed=3)


def source(lost: Any, said: list[str], **more: Any) -> LastingSource:
    cursor = Cursor(len(PROMPTS), shuffle=False)
    given = PROMPTS, cursor, rollouter(Rewards()), GRPO(samples=2)
    return LastingSource(*given, prompts_per_step=3, lost=lost, say=said.append, **more)


def test_before_they_are_scored() -> None:
    drawn = rollouter(Rewards(fails=TRIES - 1))
    group = asyncio.run(drawn.rollout(0, PROMPTS[4]))
    assert [response.reward for response in group.responses] == [0.0, 1.0]
    asked = drawn.engine.seeds[4]  # type: ignore[attr-defined]
    assert len(asked) == TRIES and len(set(asked)) == 1, (
        "the same seeds, so that the same weights give the same answers"
    )
    with pytest.raises(AnswersLost):
        asyncio.run(rollouter(Rewards(fails=TRIES)).rollout(0, PROMPTS[4]))


def test_before_failed_rewards_are_asked_for_again() -> None:
    class Failing(Rewards):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            self.fails += 1
            if self.fails == 2:
                raise GONE
            failed = Score(value=None, reason="late", transient=True)
            return [failed if self.fails == 1 else Score(value=1.0) for _ in completions]

    drawn = rollouter(Failing())

    async def asked_again() -> Group:
        return await drawn.again(await drawn.rollout(0, PROMPTS[2]), False)

    group = asyncio.run(asked_again())
    assert [response.reward for response in group.responses] == [1.0, 1.0]
    assert {response.tokens[0] for response in group.responses} == {2}, "those of the second time"


def test_before_ranks_hold_them() -> None:
    """The second group of the first step is lost twice: its last answers are in the batch, where its first were."""
    said, asked = list[str](), list[list[int]]()

    async def lost(groups: Sequence[Group]) -> list[int]:
        asked.append([group.responses[0].tokens[0] for group in groups])
        return [1] if len(asked) < 3 else []

    async def steps() -> list[Any]:
        found = source(lost, said)
        deliveries = []
        for _ in range(2):
            deliveries.append(await found.next())
            await found.done(deliveries[-1])
        await found.close()
        return deliveries

    first, second = asyncio.run(steps())
    assert asked == [[1, 1, 1], [1, 2, 1], [1, 3, 1], [1, 1, 1]]
    assert [group.index for group in (*first.groups, *second.groups)] == [0, 1, 2, 3, 4, 5]
    assert first.batch.tokens.tolist() == [0, 1, 9, 0, 1, 9, 1, 3, 9, 1, 3, 9, 2, 1, 9, 2, 1, 9]
    assert said == ["lost the answers to 1 of 3 prompts with a node; they are drawn again"] * 2


def test_their_failed_rewards_are_waited_for_too() -> None:
    """And what comes of that is held too."""
    waited = list[int]()

    async def mended(groups: Sequence[Group]) -> Sequence[Group]:
        waited.append(len(groups))
        return groups

    async def lost(groups: Sequence[Group]) -> list[int]:
        return [0] if groups[0].responses[0].tokens[0] == 1 else []

    async def step() -> None:
        found = source(lost, [], repair=mended)
        await found.next()
        await found.close()

    asyncio.run(step())
    assert waited == [3, 3]


def test_answers_that_are_lost_whenever_they_are_drawn_end_the_step() -> None:
    async def lost(groups: Sequence[Group]) -> list[int]:
        return [2]

    async def step() -> None:
        found = source(lost, [])
        try:
            await found.next()
        finally:
            await found.close()

    with pytest.raises(AnswersLost, match=f"{TRIES} times"):
        asyncio.run(step())
