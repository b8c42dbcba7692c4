"""What every online method samples, and which rows it makes of a scored group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from plaudit.algorithms import ALGORITHMS, Algorithm, PolicyGradient
from plaudit.algorithms.best_of_k import BestOfK
from plaudit.algorithms.distill import Distill
from plaudit.algorithms.grpo import GRPO
from plaudit.algorithms.online_dpo import OnlineDPO
from plaudit.algorithms.ppo import PPO
from plaudit.algorithms.reinforce import Reinforce
from plaudit.algorithms.remax import ReMax
from plaudit.algorithms.rloo import RLOO
from plaudit.algorithms.rows import row_of
from plaudit.batch import Batch
from plaudit.types import Group, Response, Role, Row, Sampling

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_tokens=2, max_tokens=9, stop=("x",), seed=3)
EVERYTHING = [PPO(), GRPO(), RLOO(), Reinforce(), Distill()]


def places(rows: list[Row]) -> list[int]:
    """Which responses the rows are of: the fixture's response i starts with token 10 + i."""
    return [row.tokens[3] - 10 for row in rows]


@pytest.mark.parametrize(
    ("method", "count"),
    [(PPO(), 1), (PPO(samples=3), 3), (GRPO(), 8), (RLOO(), 4), (Distill(), 1), (OnlineDPO(), 4), (BestOfK(), 4)],
)
def test_plan_is_the_same_sampling_for_every_sample(method: Algorithm, count: int) -> None:
    assert method.plan(SAMPLING) == [SAMPLING] * count


def test_remax_adds_one_greedy_answer_of_the_whole_distribution_at_the_end() -> None:
    *samples, greedy = ReMax(samples=2).plan(SAMPLING)
    assert samples == [SAMPLING, SAMPLING]
    assert greedy == Sampling(temperature=0.0, top_p=1.0, top_k=0, min_tokens=2, max_tokens=9, stop=("x",), seed=3)
    assert greedy.greedy


@pytest.mark.parametrize("method", EVERYTHING, ids=lambda method: type(method).__name__)
def test_a_failed_reward_has_no_row_and_no_zero(method: Algorithm, make_group: Callable[..., Group]) -> None:
    rows = method.rows(make_group([1.0, None, -2.0], index=9))
    assert places(rows) == [0, 2]
    assert [row.reward for row in rows] == [1.0, -2.0]
    assert {row.group for row in rows} == {9}
    assert method.rows(make_group([None, None])) == []


def test_a_row_is_prompt_and_answer(make_group: Callable[..., Group]) -> None:
    group = make_group([1.0, 2.0], cut=[1], index=4)
    assert PPO().rows(group) == [
        Row(
            tokens=(5, 6, 7, 10, 2),
            trainable=(False, False, False, True, True),
            group=4,
            logprobs=(0.0, 0.0, 0.0, -1.0, -0.5),
            versions=(-1, -1, -1, 6, 7),
            reward=1.0,
        ),
        Row(
            tokens=(5, 6, 7, 11, 2),
            trainable=(False, False, False, True, True),
            group=4,
            logprobs=(0.0, 0.0, 0.0, -2.0, -0.5),
            versions=(-1, -1, -1, 6, 7),
            reward=2.0,
        ),
    ]


def test_a_response_without_a_reward_cannot_become_a_row(make_group: Callable[..., Group]) -> None:
    group = make_group([None])
    with pytest.raises(AssertionError, match="reward"):
        row_of(group, group.responses[0])


def masked(response: Response) -> Response:
    return replace(response, trainable=(False,) * len(response.trainable))


def test_an_answer_that_continues_has_a_row_without_a_reward(make_group: Callable[..., Group]) -> None:
    group = make_group([1.0, None, None])
    first, second, failed = group.responses
    group = replace(group, responses=(first, replace(second, continues=True), failed))
    assert [(row.reward, row.continues) for row in PPO().rows(group)] == [(1.0, False), (0.0, True)]


@pytest.mark.parametrize("method", [GRPO(), RLOO(), Reinforce(samples=2, group_baseline=True)], ids=str)
def test_a_masked_answer_counts_in_its_groups_baseline_and_is_not_trained(
    method: Algorithm, make_group: Callable[..., Group]
) -> None:
    group = make_group([0.0, 1.0, 5.0])
    group = replace(group, responses=(*group.responses[:2], masked(group.responses[2])))
    rows = [replace(row, logprobs=(0.0,) * 5, reference=(0.0,) * 5) for row in method.rows(group)]
    batch, figures = method.credit(Batch.of(rows), {})
    assert figures["length/trained"] == 2.0
    batch = batch.trained()
    assert batch.advantages is not None and len(batch) == 2
    # Means 2; of the others 3 and 5/2; both below, where without the third one would be above.
    low, high = batch.advantages[3].item(), batch.advantages[8].item()
    expected = {"GRPO": (-2 / 7**0.5, -1 / 7**0.5), "RLOO": (-3.0, -1.5), "Reinforce": (-(0.75**0.5), 0.75**0.5)}
    assert (low, high) == pytest.approx(expected[type(method).__name__], abs=1e-3)
    nothing = replace(group, responses=tuple(map(masked, group.responses)))
    assert len(method.rows(nothing)) == 3  # of the step's mean


def test_a_masked_greedy_answer_is_remax_baseline_and_a_masked_sample_counts(make_group: Callable[..., Group]) -> None:
    group = make_group([1.0, 2.0, 0.25])
    first, second, greedy = group.responses
    rows = ReMax(samples=2).rows(replace(group, responses=(first, masked(second), masked(greedy))))
    assert [(row.reward, row.baseline, any(row.trainable)) for row in rows] == [(1.0, 0.25, True), (2.0, 0.25, False)]


def test_remax_needs_the_greedy_reward_but_not_every_sample(make_group: Callable[..., Group]) -> None:
    assert ReMax(samples=2).rows(make_group([1.0, 2.0, None])) == []
    rows = ReMax(samples=3).rows(make_group([1.0, None, 2.0, 0.25]))
    assert places(rows) == [0, 2]
    assert [(row.reward, row.baseline) for row in rows] == [(1.0, 0.25), (2.0, 0.25)]


def test_dynamic_sampling_drops_groups_that_carry_no_signal(make_group: Callable[..., Group]) -> None:
    dapo = GRPO(dynamic_sampling=True)
    assert dapo.rows(make_group([1.0, 1.0, 1.0])) == []
    assert dapo.rows(make_group([1.0, None, None])) == []
    assert places(dapo.rows(make_group([1.0, None, 0.0]))) == [0, 2]
    assert places(GRPO().rows(make_group([1.0, 1.0, 1.0]))) == [0, 1, 2]  # without it they stay, and count as equal


def with_parts(group: Group, *parts: Mapping[str, float]) -> Group:
    given = zip(group.responses, parts, strict=True)
    return replace(group, responses=tuple(replace(r, score=replace(r.score, parts=mine)) for r, mine in given))


def test_dynamic_sampling_asks_for_differences_of_a_named_part(make_group: Callable[..., Group]) -> None:
    """All three are right; the third one is too long, which made the group look mixed."""
    group = with_parts(make_group([1.0, 1.0, 0.5]), *({"gsm8k": 1.0, "overlong": x} for x in (0.0, 0.0, -0.5)))
    assert places(GRPO(dynamic_sampling=True).rows(group)) == [0, 1, 2]
    dapo = GRPO(dynamic_sampling=True, dynamic_sampling_part="gsm8k")
    assert dapo.rows(group) == []
    mixed = with_parts(group, {"gsm8k": 1.0}, {"gsm8k": 0.0}, {"gsm8k": 1.0})
    assert places(dapo.rows(mixed)) == [0, 1, 2]
    failed = make_group([1.0, None, 1.0])  # whose parts are not looked at
    assert dapo.rows(with_parts(failed, {"gsm8k": 1.0}, {"gsm8k": 0.0}, {"gsm8k": 1.0})) == []


def test_where_the_named_part_does_not_apply_the_whole_reward_must_differ(make_group: Callable[..., Group]) -> None:
    dapo = GRPO(dynamic_sampling=True, dynamic_sampling_part="gsm8k")
    other = {"polite": 1.0}
    assert places(dapo.rows(with_parts(make_group([1.0, 0.0]), other, other))) == [0, 1]
    assert dapo.rows(with_parts(make_group([1.0, 1.0]), other, other)) == []


def test_a_part_that_its_reward_does_not_have_is_named(make_group: Callable[..., Group]) -> None:
    dapo = GRPO(dynamic_sampling=True, dynamic_sampling_part="mine/acuracy")
    group = with_parts(make_group([1.0, 0.0], index=3), *({"mine": x, "mine/accuracy": x} for x in (1.0, 0.0)))
    with pytest.raises(ValueError, match=r"mine/acuracy .*p3.* mine/accuracy"):
        dapo.rows(group)


def test_online_dpo_puts_the_best_before_the_worst(make_group: Callable[..., Group]) -> None:
    rows = OnlineDPO().rows(make_group([0.5, 2.0, -1.0, 1.0]))
    assert places(rows) == [1, 2]
    assert [row.reward for row in rows] == [2.0, -1.0]
    assert places(OnlineDPO().rows(make_group([None, 0.0, None, 1.0]))) == [3, 1]
    assert places(OnlineDPO().rows(make_group([0.0, 0.0, 1.0]))) == [2, 0], "a tie of the worst is none of the group"


def test_online_dpo_drops_ties_and_lone_answers(make_group: Callable[..., Group]) -> None:
    assert OnlineDPO().rows(make_group([1.0, 1.0, 1.0])) == []
    assert OnlineDPO().rows(make_group([1.0, None])) == []
    assert OnlineDPO().rows(make_group([None, None])) == []


def test_best_of_k_keeps_the_best(make_group: Callable[..., Group]) -> None:
    assert places(BestOfK().rows(make_group([0.0, 3.0, None, 3.0]))) == [1]
    assert places(BestOfK().rows(make_group([-5.0, None]))) == [0]
    assert BestOfK().rows(make_group([None])) == []


def test_what_each_method_asks_for_trains_and_reads() -> None:
    made = {name: kind() for name, kind in ALGORITHMS.items() if kind.__module__.startswith("plaudit.")}
    reference, critic = Role.REFERENCE, Role.CRITIC
    assert {name: method.asks for name, method in made.items()} == {
        "sft": frozenset(),
        "reward": frozenset(),
        "dpo": {reference},
        "kto": {reference},
        "orpo": frozenset(),
        "simpo": frozenset(),
        "ppo": {reference, critic},
        "grpo": frozenset(),
        "rloo": {reference},
        "remax": {reference},
        "reinforce": {reference},
        "distill": {reference},
        "online-dpo": {reference},
        "best-of-k": frozenset(),
    }
    assert GRPO(kl_in_loss=0.04).asks == BestOfK(kl_in_loss=0.4).asks == {reference}
    trained = {name: set(method.losses()) for name, method in made.items()}
    assert trained.pop("reward") == {Role.JUDGE}
    assert trained.pop("ppo") == {Role.POLICY, critic}
    assert all(roles == {Role.POLICY} for roles in trained.values())
    assert {name for name, method in made.items() if method.unit == 2} == {
        "reward",
        "dpo",
        "kto",
        "orpo",
        "simpo",
        "online-dpo",
    }
    assert {name for name, method in made.items() if method.uses_ratio} == {
        name for name, method in made.items() if isinstance(method, PolicyGradient)
    }
    assert {name: method.data for name, method in made.items() if not isinstance(method, Algorithm)} == {
        "sft": "demonstrations",
        "reward": "preferences",
        "dpo": "preferences",
        "kto": "judgements",
        "orpo": "preferences",
        "simpo": "preferences",
    }
    assert {method.data for method in made.values() if isinstance(method, Algorithm)} == {"prompts"}
