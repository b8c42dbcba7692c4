"""An episode of several rows counts once: in its group, in weights, and as one return. Numbers are worked by hand.

Group of two episodes. The first was asked anew after two tokens, so it has two rows; T is trained:

    row 0   7 8 | 4 5            - -  T T         episode 0, reward 1
    row 1   7 9 6 | 3 2          - - -  - T       episode 0 (3 is of the environment)
    row 2   7 8 | 6              - -  T           episode 1, reward 0
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plaudit.algorithms import GRPO, PPO, RLOO, BestOfK, OnlineDPO, Reinforce, ReMax
from plaudit.algorithms.rows import Answers, rows_of
from plaudit.batch import Batch
from plaudit.types import Completion, Episode, Finish, Group, Numbers, Prompt, Response, Row, Score

PROMPT = Prompt(id="p", text="", tokens=(7, 8))


def response(reward: float, tokens: tuple[int, ...], sampled: tuple[int, ...], restarts: Any = ()) -> Response:
    completion = Completion(
        tokens=Numbers("i", tokens),
        logprobs=Numbers("f", [-0.5 * mine for mine in sampled]),
        versions=Numbers("i", [3 if mine else -1 for mine in sampled]),
        text="",
        finish=Finish.EOS,
        episode=Episode(sampled=Numbers("b", sampled), restarts=restarts),
    )
    return Response(
        completion=completion, trainable=Numbers("b", sampled), score=Score(value=reward), reward=reward, greedy=False
    )


FIRST = response(1.0, (4, 5, 3, 2), (1, 1, 0, 1), restarts=((2, (7, 9, 6)),))
SECOND = response(0.0, (6,), (1,))
GROUP = Group(index=4, prompt=PROMPT, responses=(FIRST, SECOND))


def batch_of(rows: list[Row], **columns: list[float]) -> Batch:
    batch = Batch.of(rows)
    zero = torch.zeros(len(batch.tokens))
    return batch.with_columns(
        reference=zero - 0.5 * batch.trainable, **{k: torch.tensor(v) for k, v in columns.items()}
    )


def test_each_sequence_of_an_episode_is_a_row_with_its_own_prefix() -> None:
    rows = GRPO().rows(GROUP)
    assert [tuple(row.tokens) for row in rows] == [(7, 8, 4, 5), (7, 9, 6, 3, 2), (7, 8, 6)]
    assert [tuple(row.trainable) for row in rows] == [(0, 0, 1, 1), (0, 0, 0, 0, 1), (0, 0, 1)]
    assert [tuple(row.versions or ()) for row in rows] == [(-1, -1, 3, 3), (-1, -1, -1, -1, 3), (-1, -1, 3)]
    assert [tuple(row.logprobs or ()) for row in rows] == [(0, 0, -0.5, -0.5), (0, 0, 0, 0, -0.5), (0, 0, -0.5)]
    assert [(row.reward, row.further, row.group) for row in rows] == [(1.0, False, 4), (1.0, True, 4), (0.0, False, 4)]
    first = response(1.0, (4, 5, 3, 2), (1, 1, 0, 1), restarts=((0, (9,)),))
    assert [tuple(row.tokens) for row in rows_of(GROUP, first)] == [(9, 4, 5, 3, 2)], "the first question changed it"


def test_a_batch_numbers_answers_and_keeps_rows_of_an_episode_together_in_any_order() -> None:
    batch = batch_of(GRPO().rows(GROUP))
    answers = Answers(batch)
    assert (answers.count, answers.row.tolist()) == (2, [0, 0, 1])
    assert answers.token.tolist() == [0] * 9 + [1] * 3
    assert answers.of(batch.reward).tolist() == [1.0, 0.0]
    turned = batch.select(torch.tensor([2, 1, 0]))
    answers = Answers(turned)
    assert answers.token.tolist() == [1] * 3 + [0] * 9
    assert answers.of(turned.reward).tolist() == [1.0, 0.0]
    plain = batch_of(GRPO().rows(Group(index=0, prompt=PROMPT, responses=(SECOND, SECOND))))
    assert (plain.episode, Answers(plain).count, Answers(plain).token.tolist()) == (None, 2, [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        (GRPO(scale_rewards=False), 0.5, -0.5),  # mean of the episodes 1/2; of the rows it would be 2/3
        (RLOO(kl_coefficient=0.0), 1.0, -1.0),  # each against the other
    ],
)
def test_baselines_count_episodes(method: Any, first: float, second: float) -> None:
    batch, figures = method.credit(batch_of(method.rows(GROUP)), {})
    assert batch.advantages.tolist() == [0, 0, first, first, 0, 0, 0, 0, first, 0, 0, second]
    assert figures["length/trained"] == 2.0, "3 tokens and 1"


def test_a_baseline_of_the_greedy_answer_is_taken_from_each_row_of_an_episode() -> None:
    method = ReMax(kl_coefficient=0.0, centre_advantages=False)
    greedy = replace(SECOND, reward=0.25, greedy=True)
    batch, _ = method.credit(batch_of(method.rows(replace(GROUP, responses=(FIRST, SECOND, greedy)))), {})
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0, 0.75, 0.75, 0, 0, 0, 0, 0.75, 0, 0, -0.25]


@pytest.mark.parametrize(
    ("aggregation", "first", "second"),
    [
        ("token", 1 / 4, 1 / 4),
        ("sequence", 1 / 6, 1 / 2),  # each episode half, the first over its three tokens; rows would give it 2/3
        (10.0, 1 / 20, 1 / 20),  # two episodes, each by ten
    ],
)
def test_aggregation_counts_an_episode_once(aggregation: str | float, first: float, second: float) -> None:
    batch = GRPO(aggregation=aggregation).weigh(batch_of(GRPO().rows(GROUP)))
    assert batch.weight is not None
    assert batch.weight.tolist() == pytest.approx([0, 0, first, first, 0, 0, 0, 0, first, 0, 0, second])


def test_a_return_runs_on_from_one_row_to_the_next() -> None:
    """REINFORCE++: the reward stands at the episode's last token, two and one policy tokens after the others."""
    method = Reinforce(kl_coefficient=0.0, discount=0.5)
    batch, _ = method.credit(batch_of(method.rows(GROUP)), {})
    returns = torch.tensor([0.25, 0.5, 1.0, 0.0])
    expected = (returns - returns.mean()) / returns.std()
    assert batch.advantages is not None
    assert batch.advantages[batch.trainable].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_value_after_a_rows_last_token_is_that_of_the_next_rows_first() -> None:
    """GAE, gamma 1, lambda 1/2. Values of the trained tokens: 0.2, 0.4 | 0.6 and 0.1 of the other episode.

    delta: 0.4 - 0.2 = 0.2,  0.6 - 0.4 = 0.2,  1 - 0.6 = 0.4;   0 - 0.1 = -0.1
    A:     0.2 + 0.4 / 2 = 0.4,  0.2 + 0.4 / 2 = 0.4,  0.4;   -0.1
    """
    method = PPO(kl_coefficient=0.0, trace=0.5, whiten_advantages=False)
    values = [0.0, 0.0, 0.2, 0.4, 0.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.1]
    batch = batch_of(method.rows(GROUP), values=values, bootstrap=[0.9, 0.9, 0.9])
    found, _ = method.credit(batch, {})
    assert found.advantages is not None and found.returns is not None
    assert found.advantages[batch.trainable].tolist() == pytest.approx([0.4, 0.4, 0.4, -0.1])
    assert found.returns[batch.trainable].tolist() == pytest.approx([0.6, 0.8, 1.0, 0.0])


def test_a_cut_episode_goes_on_with_the_value_after_its_last_row() -> None:
    method = PPO(kl_coefficient=0.0, trace=1.0, whiten_advantages=False)
    cut = replace(FIRST, reward=None, continues=True)
    rows = method.rows(replace(GROUP, responses=(cut, SECOND)))
    batch, _ = method.credit(batch_of(rows, values=[0.0] * 12, bootstrap=[0.3, 0.9, 0.5]), {})
    assert batch.returns is not None
    assert batch.returns[batch.trainable].tolist() == pytest.approx([0.9, 0.9, 0.9, 0.0])


def test_methods_that_pick_answers_leave_episodes_of_several_rows_out() -> None:
    third = response(0.5, (9,), (1,))
    rows = OnlineDPO().rows(replace(GROUP, responses=(FIRST, SECOND, third)))
    assert [tuple(row.tokens) for row in rows] == [(7, 8, 9), (7, 8, 6)], "0.5 against 0, not 1 against 0"
    assert OnlineDPO().rows(GROUP) == []
    assert [tuple(row.tokens) for row in BestOfK().rows(GROUP)] == [(7, 8, 6)]


def test_mini_batches_keep_the_rows_of_an_episode_together() -> None:
    """Else it would count in each of them. Of three answers, in four rows, the second has two rows."""
    batch = batch_of(GRPO().rows(replace(GROUP, responses=(SECOND, FIRST, SECOND))))
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        parts = batch.split(2, order=torch.tensor(order))
        assert sorted(Answers(part).count for part in parts) == [1, 2]
        assert sum(len(part) for part in parts) == 4
        weights = [GRPO(aggregation="sequence").weigh(part).weight for part in parts]
        assert [float(one.sum()) for one in weights if one is not None] == pytest.approx([1.0, 1.0])
        for part in parts:
            mine = part.episode.tolist() if part.episode is not None else []
            assert mine.count(1) in (0, 2), "both rows or none"
    assert len(batch.split(4)) == 3, "no more than answers"
