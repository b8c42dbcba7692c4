"""The source of online batches: order, slots, failure and what a resumed run draws."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plaudit.algorithms import GRPO
from plaudit.batch import Batch
from plaudit.data.cursor import Cursor
from plaudit.loop.online import OnlineSource
from plaudit.loop.progress import batch_of
from plaudit.types import Completion, Finish, Group, Prompt, Response, Row, Score

PROMPTS = [Prompt(id=str(n), text="", tokens=(n,)) for n in range(10)]


class Answers:
    """Rollouts that last as many turns of the loop as `turns` says, and are worth what `rewards` says."""

    def __init__(
        self, turns: Callable[[int], int] = lambda index: 1, rewards: Callable[[int], Any] = lambda i: (0.0, 1.0)
    ):
        self.turns, self.rewards = turns, rewards
        self.running: set[int] = set()
        self.most = 0
        self.begun: list[int] = []

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        self.begun.append(index)
        self.running.add(index)
        self.most = max(self.most, len(self.running))
        try:
            for _ in range(self.turns(index)):
                await asyncio.sleep(0)
        finally:
            self.running.discard(index)
        completion = Completion(tokens=(1, 2), logprobs=(-1.0, -1.0), versions=(0, 0), text="", finish=Finish.EOS)
        responses = [
            Response(completion=completion, trainable=(True, True), score=score, reward=score.value)
            for score in (Score(value=x, reason="late" if x is None else None) for x in self.rewards(index))
        ]
        return Group(index=index, prompt=prompt, responses=tuple(responses))


def source_of(answers: Answers, *, lag: int = 0, cursor: Any = None, **more: Any) -> OnlineSource:
    cursor = cursor or Cursor(len(PROMPTS), shuffle=False)
    algorithm = GRPO(samples=2, dynamic_sampling=True)
    return OnlineSource(PROMPTS, cursor, answers, algorithm, prompts_per_step=3, max_lag=lag, **more)  # type: ignore[arg-type]


def indices(delivery: Any) -> list[int]:
    return [group.index for group in delivery.groups]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_groups_come_in_the_order_drawn_from_at_most_so_many_slots(lag: int) -> None:
    answers = Answers(turns=lambda index: 20 - 7 * (index % 3))  # later ones are ready sooner

    async def steps() -> list[tuple[list[int], int]]:
        source = source_of(answers, lag=lag)
        found = []
        for _ in range(4):
            delivery = await source.next()
            found.append((indices(delivery), delivery.epoch))
            await source.done(delivery)
        await source.close()
        assert len(asyncio.all_tasks()) == 1  # this one: a feeder for all steps, and it is gone
        return found

    # ten prompts: the fourth step begins with the last one of the first epoch
    assert asyncio.run(steps()) == [([0, 1, 2], 1), ([3, 4, 5], 1), ([6, 7, 8], 1), ([9, 10, 11], 1)]
    assert answers.most <= 3 * (lag + 1)
    assert answers.running == set()


def test_a_step_of_masked_answers_only_is_empty() -> None:
    trained, masked = (Row(tokens=(1, 2), trainable=(False, whether)) for whether in (True, False))
    assert batch_of([], 1) is batch_of([masked, masked], 1) is None
    batch = batch_of([masked, trained], 1)
    assert batch is not None and len(batch) == 2


def test_a_step_may_draw_the_data_several_times() -> None:
    async def steps() -> list[tuple[int, float]]:
        source = source_of(Answers(), cursor=Cursor(2, shuffle=False))
        found = []
        for _ in range(4):
            delivery = await source.next()
            found.append((delivery.epoch, delivery.epochs_done))
            await source.done(delivery)
        await source.close()
        return found

    assert asyncio.run(steps()) == [(1, 1.5), (2, 3), (4, 4.5), (5, 6)]  # of two prompts, three a step


def test_nothing_starts_before_the_weights_of_its_step_are_published() -> None:
    answers = Answers()

    async def steps() -> None:
        source = source_of(answers)
        delivery = await source.next()
        for _ in range(50):
            await asyncio.sleep(0)
        assert answers.begun == [0, 1, 2]
        await source.done(delivery)
        await source.next()
        assert answers.begun == [0, 1, 2, 3, 4, 5]
        await source.close()

    asyncio.run(steps())


def test_groups_without_a_signal_are_replaced_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.loop.online.MAX_REDRAW", 2.0)
    answers = Answers(rewards=lambda index: (1.0, 1.0) if index in (1, 2, 3) or 5 < index < 20 else (0.0, 1.0))

    async def steps() -> None:
        source = source_of(answers)
        first = await source.next()
        assert indices(first) == [0, 4, 5]  # 1 to 3 were dropped and their slots drew again: six prompts in all
        assert first.stats["groups/dropped"] == 3
        assert source.state() == {"consumed": 6}
        await source.done(first)
        second = await source.next()
        assert second.batch is None  # 6 to 11 say nothing, and the step gives up
        assert second.stats["groups/dropped"] == 6
        assert answers.running == set()  # and leaves nothing behind for the next one
        assert source.state() == {"consumed": 12}
        await source.done(second)
        third = await source.next()
        assert answers.begun == list(range(18))
        assert source.slots._value == 0
        await source.done(third)
        await source.close()

    asyncio.run(steps())


def test_a_resumed_source_draws_what_was_not_consumed() -> None:
    async def after(consumed: int) -> list[int]:
        source = source_of(Answers())
        source.restore({"consumed": consumed})
        found = indices(await source.next())
        await source.close()
        return found

    assert asyncio.run(after(7)) == [7, 8, 9]


def test_a_rollout_that_fails_ends_the_step_with_its_error() -> None:
    def turns(index: int) -> int:
        if index == 1:
            raise ArithmeticError("the engine broke")
        return 10**9  # the others would go on for ever

    answers = Answers(turns=lambda index: turns(index) if index else 1)

    async def steps() -> None:
        source = source_of(answers)
        with pytest.raises(ArithmeticError, match="the engine broke"):
            await source.next()
        await source.close()

    asyncio.run(steps())
    assert answers.running == set()


def test_which_groups_are_replaced_does_not_depend_on_rewards_that_failed_for_a_while() -> None:
    """Groups 1 and 4 say nothing, which is seen of 4 only once its rewards have come; 0 and 2 failed as well."""
    values = {1: (1.0, 1.0), 4: (1.0, 1.0)}

    async def step(away: tuple[int, ...]) -> tuple[list[int], list[int], int, list[int]]:
        asked: list[int] = []

        async def mended(groups: Sequence[Group]) -> Sequence[Group]:
            asked.append(len(groups))
            whole = Answers(rewards=lambda index: values.get(index, (0.0, 1.0)))
            return [await whole.rollout(group.index, group.prompt) for group in groups]

        answers = Answers(rewards=lambda index: (None, None) if index in away else values.get(index, (0.0, 1.0)))
        source = source_of(answers, repair=mended)
        delivery = await source.next()
        await source.close()
        dropped = [group.index for group in delivery.dropped]
        return indices(delivery), dropped, source.state()["consumed"], asked

    undisturbed = asyncio.run(step(()))
    assert undisturbed[:3] == ([0, 2, 3], [1], 4)
    values[3] = (1.0, 1.0)
    for away in ((), (0, 1, 2), (0,), (1, 4), (3, 4, 5)):
        assert asyncio.run(step(away))[:3] == ([0, 2, 5], [1, 3, 4], 6), away


def test_a_reward_that_comes_with_a_replacement_is_learned_from() -> None:
    """Group 0 was kept without its third reward; the step then waits for the group that takes the place of group 1, and
    that one stays out, though its own third reward would now be a signal."""
    rewards = {0: (0.0, 1.0, None), 1: (1.0, 1.0, None)}
    asked = 0

    async def mended(groups: Sequence[Group]) -> Sequence[Group]:
        nonlocal asked
        asked += 1
        whole = Answers(rewards=lambda index: (0.0, 1.0, 5.0))
        return groups if asked == 1 else [await whole.rollout(n, PROMPTS[n]) for n in (0, 1)] + list(groups[2:])

    async def step() -> Any:
        source = source_of(Answers(rewards=lambda index: rewards.get(index, (0.0, 1.0, 2.0))), repair=mended)
        delivery = await source.next()
        await source.close()
        return source.algorithm, delivery

    algorithm, delivery = asyncio.run(step())
    assert (asked, indices(delivery), [group.index for group in delivery.dropped]) == (2, [0, 2, 3], [1])
    assert [response.reward for response in delivery.groups[0].responses] == [0.0, 1.0, 5.0]
    rows = [row for group in delivery.groups for row in algorithm.rows(group)]
    learned, wanted = delivery.batch.columns(), Batch.of(rows, unit=algorithm.unit).columns()
    assert learned.keys() == wanted.keys()
    assert all(learned[name].equal(wanted[name]) for name in wanted)


def test_a_feeder_that_fails_is_an_error_and_no_endless_wait() -> None:
    class Broken(Cursor):
        def item(self, draw: int) -> int:
            if draw == 1:
                raise ArithmeticError("no such draw")
            return super().item(draw)

    async def steps() -> None:
        source = source_of(Answers(), cursor=Broken(len(PROMPTS)))
        with pytest.raises(ArithmeticError, match="no such draw"):
            async with asyncio.timeout(20):
                await source.next()
        await source.close()

    asyncio.run(steps())


def test_closing_cancels_what_runs() -> None:
    answers = Answers(turns=lambda index: 10**9)

    async def steps() -> None:
        source = source_of(answers)
        waiting = asyncio.create_task(source.next())
        for _ in range(5):
            await asyncio.sleep(0)
        assert answers.running == {0, 1, 2}
        waiting.cancel()
        await source.close()
        assert answers.running == set()

    asyncio.run(steps())
