"""Rewards that stand at tokens before the end. Numbers are worked by hand.

Group of three episodes; T is trained, o is of the environment; process rewards are at the ends of turns:

    A   7 | T T o T T     1 at the first turn, 0.5 at the second, 2 at the end: 3.5 in all
    B   7 | T             0 at its only turn, 1 at the end: 1
    C   7 | T o T         2 and 1.5, 0 at the end: 3.5
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from plaudit.algorithms import GRPO, PPO, RLOO, Reinforce
from plaudit.algorithms.rows import rows_of
from plaudit.batch import Batch
from plaudit.loop.recorded import as_json, from_json
from plaudit.maths.advantages import by_turn
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.settings import ShapingSettings
from plaudit.rewards.shaping import shaped
from plaudit.rewards.weighted import WeightedReward
from plaudit.types import Completion, Episode, Finish, Group, Numbers, Prompt, Response, Score

PROMPT = Prompt(id="p", text="", tokens=(7,))
SAMPLED = {"A": (1, 1, 0, 1, 1), "B": (1,), "C": (1, 0, 1)}
PROCESS = {"A": ((1, 1.0), (4, 0.5)), "B": ((0, 0.0),), "C": ((0, 2.0), (2, 1.5))}
VALUE = {"A": 3.5, "B": 1.0, "C": 3.5}


def completion(sampled: tuple[int, ...], finish: Finish = Finish.EOS, restarts: tuple = ()) -> Completion:
    return Completion(
        tokens=Numbers("i", range(10, 10 + len(sampled))),
        logprobs=Numbers("f", [-0.5 * one for one in sampled]),
        versions=Numbers("i", [0 if one else -1 for one in sampled]),
        text="",
        finish=finish,
        episode=Episode(sampled=Numbers("b", sampled), restarts=restarts),
    )


def response(name: str) -> Response:
    score = Score(value=VALUE[name], process=PROCESS[name])
    return shaped(completion(SAMPLED[name]), score, ShapingSettings())


GROUP = Group(index=0, prompt=PROMPT, responses=tuple(map(response, "ABC")))


def batch_of(method: GRPO | PPO | RLOO | Reinforce, *, reference: float = -0.5) -> Batch:
    batch = Batch.of([row for one in GROUP.responses for row in rows_of(GROUP, one)])
    return batch.with_columns(reference=torch.where(batch.trainable, reference, 0.0))


def credited(method: GRPO | RLOO | Reinforce) -> list[list[float]]:
    batch = method.credit(batch_of(method), {})[0]
    assert batch.advantages is not None
    parts = torch.split(batch.advantages, batch.lengths.tolist())
    return [[round(one, 4) for one in part.tolist()[1:]] for part in parts]


def test_a_column_of_rewards_a_token() -> None:
    batch = batch_of(GRPO())
    assert batch.process is not None
    assert batch.process.tolist() == [0, 0, 1, 0, 0, 0.5, 0, 0, 0, 2, 0, 1.5]
    assert batch.reward is not None
    assert batch.reward.tolist() == [3.5, 1.0, 3.5]
    plain = Response(completion=completion((1,)), trainable=(1,), score=Score(value=1.0), reward=1.0)
    assert Batch.of(rows_of(GROUP, plain)).process is None


def test_a_rewritten_episode_has_each_reward_in_the_row_of_its_token() -> None:
    """Token 3 begins a second row of prefix 8 9: its place there is 2 + (4 - 3)."""
    answer = completion(SAMPLED["A"], restarts=((3, (8, 9)),))
    one = shaped(answer, Score(value=3.5, process=PROCESS["A"]), ShapingSettings())
    assert [row.process for row in rows_of(GROUP, one)] == [((2, 1.0),), ((3, 0.5),)]


def test_without_credit_by_turn_every_token_has_the_whole_rewards_advantage() -> None:
    """3.5, 1, 3.5 less their mean 8/3."""
    assert credited(GRPO(scale_rewards=False)) == [[0.8333, 0.8333, 0, 0.8333, 0.8333], [-1.6667], [0.8333, 0, 0.8333]]


def test_credit_by_turn() -> None:
    """First turns earned 1, 0, 2 (mean 1), second ones 0.5 and 1.5 (mean 1), the ends 2, 1, 0 (mean 1)."""
    assert credited(GRPO(scale_rewards=False, turn_credit=0.0)) == [[0, 0, 0, -0.5, -0.5], [-1], [1, 0, 0.5]]
    assert credited(GRPO(scale_rewards=False, turn_credit=0.5)) == [[0.5, 0.5, 0, 0, 0], [-1], [0.5, 0, 0]]
    # with deviations: 1 of the first turns and the ends, sqrt(0.5) of the second turns; each + 1e-4
    one, two = 1 / 1.0001, 0.5 / (0.5**0.5 + 1e-4)
    first, second, third = credited(GRPO(turn_credit=0.5))
    assert first == pytest.approx([one / 2, one / 2, 0, one / 2 - two, one / 2 - two], abs=1e-4)
    assert second == pytest.approx([-one], abs=1e-4)
    assert third == pytest.approx([one / 2, 0, two - one / 2], abs=1e-4)


def test_a_turn_that_one_episode_reaches_has_no_credit_of_its_own() -> None:
    """And two groups are two: their first turns are not compared."""
    trained = torch.tensor([False, True, False, True, False, True, False, True])
    process = torch.tensor([0.0, 1.0, 0.0, 5.0, 0.0, 3.0, 0.0, 9.0])
    answer = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    found = by_turn(process, trained, answer, torch.tensor([4, 4, 6]), scale=False)
    assert found.tolist() == [0, -1, 0, 0, 0, 1, 0, 0]
    assert by_turn(process * 0, trained & False, answer, torch.tensor([4, 4, 6]), scale=False).tolist() == [0] * 8


def test_the_return_of_a_token_is_what_is_earned_after_it_discounted_by_the_policys_tokens() -> None:
    """A with gamma 1/2: the rewards at its tokens are 0, 1, 0, 0.5 + 2. From the end: 2.5, 1.25, 1.625, 0.8125. The
    observation takes no time. B: 1. C: 2 and 1.5: 2.75, 1.5."""
    method = Reinforce(kl_coefficient=0.0, discount=0.5)
    returns = torch.tensor([0.8125, 1.625, 1.25, 2.5, 1.0, 2.75, 1.5])
    white = ((returns - returns.mean()) / (returns.std() + 1e-8)).tolist()
    first, second, third, fourth, fifth, sixth, seventh = (round(one, 4) for one in white)
    assert credited(method) == [[first, second, 0, third, fourth], [fifth], [sixth, 0, seventh]]


def test_ppo_and_its_values() -> None:
    """GAE with gamma and lambda 1 and values of 1/4: A = return - 1/4. A's returns: 3.5, 3.5, 2.5, 2.5."""
    batch = batch_of(PPO())
    batch = batch.with_columns(
        values=torch.full_like(batch.reference, 0.25) * batch.trainable, bootstrap=torch.zeros(len(batch))
    )
    method = PPO(kl_coefficient=0.0, trace=1.0, whiten_advantages=False)
    found = method.credit(batch, {})[0]
    assert found.advantages is not None and found.returns is not None
    assert found.advantages.tolist() == [0, 3.25, 3.25, 0, 2.25, 2.25, 0, 0.75, 0, 3.25, 0, 1.25]
    assert found.returns.tolist() == [0, 3.5, 3.5, 0, 2.5, 2.5, 0, 1.0, 0, 3.5, 0, 1.5]


def test_rloo_compares_whole_rewards() -> None:
    """3.5 - (1 + 3.5) / 2 = 1.25, and 1 - 3.5."""
    assert credited(RLOO(kl_coefficient=0.0)) == [[1.25, 1.25, 0, 1.25, 1.25], [-2.5], [1.25, 0, 1.25]]


@pytest.mark.parametrize(
    ("settings", "finish", "reward", "process"),
    [
        (ShapingSettings(scale=2.0, shift=1.0), Finish.EOS, 9.0, ((1, 2.0), (4, 1.0))),  # the shift is of the end
        (ShapingSettings(clip=3.0), Finish.EOS, 3.0, ((1, 1.0), (4, 0.5))),
        (ShapingSettings(unfinished="penalty"), Finish.TURNS, -1.0, ()),
        (ShapingSettings(unfinished="bootstrap"), Finish.TURNS, None, ((1, 1.0), (4, 0.5))),
        (ShapingSettings(unfinished="mask"), Finish.TURNS, None, ()),
    ],
)
def test_shaping(settings: ShapingSettings, finish: Finish, reward: float | None, process: tuple) -> None:
    score = Score(value=3.5, process=PROCESS["A"])
    one = shaped(completion(SAMPLED["A"], finish), score, settings)
    assert (one.reward, one.process) == (reward, process)
    if one.continues:  # what was earned so far; the critic's value stands for the rest
        assert [row.reward for row in rows_of(GROUP, one)] == [1.5]


@pytest.mark.parametrize("place", [2, 5, -1])
def test_a_reward_at_a_token_that_was_not_sampled_fails(place: int) -> None:
    one = shaped(completion(SAMPLED["A"]), Score(value=1.0, process=((place, 1.0),)), ShapingSettings())
    assert one.score.failed and one.reward is None
    assert one.score.reason == f"a process reward is at token {place}: give a token that the policy sampled, of 0 to 4"


def paid(turn_ends: list[int], finished: bool) -> dict[str, object]:
    """One for each turn and one at the end; for an unfinished answer, a list, which is refused."""
    return (
        {"reward": len(turn_ends) + 1.0, "process": dict.fromkeys(turn_ends, 1.0)}
        if finished
        else {"reward": 1.0, "process": [3]}
    )


def test_a_function_gives_them_and_a_weighted_sum_keeps_them() -> None:
    reward = WeightedReward([(FunctionReward(paid), 0.5, "paid"), (FunctionReward(lambda text: 2.0), 1.0, "two")])
    answers = [completion(SAMPLED["A"]), completion(SAMPLED["A"], Finish.TURNS)]
    score, wrong = asyncio.run(reward.score(PROMPT, answers))
    assert (score.value, score.process) == (3.5, ((1, 0.5), (4, 0.5)))
    assert wrong.failed and "give {index of a token: reward}" in (wrong.reason or "")
    plain = Completion(tokens=(5, 6, 2), logprobs=(0,) * 3, versions=(0,) * 3, text="ab", finish=Finish.EOS)
    (score,) = asyncio.run(FunctionReward(paid).score(PROMPT, [plain]))
    assert score.process == ((2, 1.0),)


def test_a_record_keeps_them() -> None:
    group = from_json(as_json(GROUP), PROMPT)
    assert [one.process for one in group.responses] == [PROCESS[name] for name in "ABC"]
