"""Rewards that fail at large: who is asked again, how long, and how it ends; on a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from plaudit.loop.outage import Outage, RewardFailureError
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.settings import ShapingSettings
from plaudit.rollout.rollouter import Rollouter
from plaudit.support.errors import Stopped
from plaudit.types import Completion, Finish, Group, Prompt, Response, Score

DONE = Completion(tokens=(1, 2), logprobs=(-1.0, -1.0), versions=(0, 0), text="a", finish=Finish.EOS)
AWAY = Score(value=None, reason="judge: http://here: ConnectError (1 attempt)", transient=True)
WRONG = Score(value=None, reason="rule: TypeError: one", transient=False)
FINE = Score(value=1.0)


def group(index: int, *scores: Score) -> Group:
    responses = (Response(completion=DONE, trainable=(True, True), score=s, reward=s.value) for s in scores)
    return Group(index=index, prompt=Prompt(id=str(index), text="", tokens=(1,)), responses=tuple(responses))


class Case:
    """Rewards that answer as `then` says after so many seconds; time passes only in the outage's own sleeps."""

    def __init__(self, then: Callable[[float, Score], Score], *, most: float = 0.1, patience: float = 1800.0):
        self.now, self.then = 1000.0, then
        self.asked: list[tuple[float, list[str | None]]] = []
        self.slept: list[float] = []
        self.said: list[str] = []
        self.page: list[str] = []
        self.stop: list[int] = []
        self.outage = Outage(
            self.again,
            most=most,
            patience=patience,
            stop=self.stop,
            say=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.outage.listeners.append(self.page.append)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    async def again(self, given: Group, lasting: bool) -> Group:
        asked = [r.score for r in given.responses if r.score.value is None and (lasting or r.score.transient)]
        self.asked.append((self.now - 1000.0, [score.reason for score in asked]))
        scores = [self.then(self.now - 1000.0, r.score) if r.score in asked else r.score for r in given.responses]
        return group(given.index, *scores)


def values(groups: list[Group]) -> list[float | None]:
    return [response.score.value for group in groups for response in group.responses]


def test_few_failures_are_left_as_they_are() -> None:
    case = Case(lambda now, score: FINE, most=0.25)
    assert values(asyncio.run(case.outage.repaired([group(0, AWAY, FINE, FINE, FINE)]))) == [None, 1.0, 1.0, 1.0]
    assert (case.asked, case.said) == ([], [])


def test_a_server_that_is_away_is_asked_with_growing_waits_until_it_answers() -> None:
    case = Case(lambda now, score: FINE if now >= 200 else AWAY)
    found = asyncio.run(case.outage.repaired([group(0, AWAY, FINE), group(1, AWAY, AWAY)]))
    assert values(found) == [1.0] * 4
    assert case.slept == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(reasons == [AWAY.reason] * count for (_, reasons), count in zip(case.asked, [1, 2] * 10, strict=True))
    assert case.said[5] == (
        "rewards have failed for 0:31 (judge: http://here: ConnectError (1 attempt)): next try in 32 s, patience 30:00"
    )
    assert case.said[-1] == "rewards work again, after 4:03"
    assert case.page == [*case.said[:-1], ""]


def test_one_try_more_that_helps_is_not_worth_a_word() -> None:
    case = Case(lambda now, score: FINE)
    assert values(asyncio.run(case.outage.repaired([group(0, AWAY, AWAY)]))) == [1.0, 1.0]
    assert (case.slept, case.said) == ([], [])


@pytest.mark.parametrize("patience", [0.0, 100.0, 1800.0])
def test_it_ends_when_patience_is_over_and_not_before(patience: float) -> None:
    case = Case(lambda now, score: AWAY, patience=patience)
    with pytest.raises(
        RewardFailureError,
        match=rf"^100% .* 10% .*rollout\.max_failed.*ConnectError.* {patience:g} s \(rollout\.reward_patience\)\.$",
    ):
        asyncio.run(case.outage.repaired([group(0, AWAY, AWAY)]))
    assert case.now - 1000.0 == patience
    assert case.asked[-1][0] == patience, "the last try is at the end of it"


def test_a_mistake_in_a_function_is_not_waited_for() -> None:
    case = Case(lambda now, score: score)
    with pytest.raises(RewardFailureError, match=r"^100% .* \['rule: TypeError: one'\]\.$"):
        asyncio.run(case.outage.repaired([group(0, WRONG, WRONG)]))
    assert case.slept == [1, 2]


def test_evaluations_wait_as_steps_do_but_bear_what_does_not_pass() -> None:
    case = Case(lambda now, score: FINE if score is AWAY and now > 10 else score)
    assert values(asyncio.run(case.outage.waited([group(0, WRONG, WRONG, AWAY)]))) == [None, None, 1.0]
    assert case.slept == [1, 2, 4, 8]
    assert [reasons for _, reasons in case.asked][2:] == [[WRONG.reason] * 2 + [AWAY.reason], *[[AWAY.reason]] * 2]


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_ends_the_wait(before: bool) -> None:
    case = Case(lambda now, score: AWAY)

    async def asleep(seconds: float) -> None:
        case.stop.append(2)
        await asyncio.sleep(3600)

    case.outage._sleep = asleep
    if before:
        case.stop.append(2)
    with pytest.raises(Stopped):
        asyncio.run(asyncio.wait_for(case.outage.repaired([group(0, AWAY, AWAY)]), 10))


def test_answers_are_asked_about_again_as_they_are_and_shaped_alike() -> None:
    """Of a real rollouter and reward function: what has a score keeps it."""
    calls: list[str] = []

    def reward(completion: str) -> float:
        calls.append(completion)
        if len(calls) < 4 and completion != "b":
            raise ConnectionError("gone")
        return float(len(completion))

    rollouter = Rollouter(None, FunctionReward(reward), ShapingSettings(scale=2.0), [], seed=0)  # type: ignore[arg-type]
    given = group(0, *[Score(value=None, transient=True)] * 3)
    texts = [replace(DONE, text=text) for text in ("a", "b", "ccc")]
    responses = [replace(r, completion=c) for r, c in zip(given.responses, texts, strict=True)]
    outage = Outage(rollouter.again, most=0.0, patience=10.0, sleep=lambda seconds: asyncio.sleep(0))
    (found,) = asyncio.run(outage.repaired([replace(given, responses=tuple(responses))]))
    assert calls == ["a", "b", "ccc", "a", "ccc"]
    assert [response.reward for response in found.responses] == [2.0, 2.0, 6.0]
    assert [response.completion for response in found.responses] == texts
