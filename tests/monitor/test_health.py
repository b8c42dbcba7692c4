"""Each sign warns on a series that shows it, once, and stays silent on healthy ones."""

import itertools
import json
import math
import random
import re

import pytest

from plaudit.monitor.health import SIGNS, Health


def warnings(series, *, steps):
    """All warnings, as (step, words), for metrics given as functions of the step."""
    health = Health()
    return [
        (step, words)
        for step in range(1, steps + 1)
        for words in health.check({"step": float(step), "time": 0.1 * step} | {n: f(step) for n, f in series.items()})
    ]


def healthy(seed=0, steps=200):
    noise = random.Random(seed)
    return {
        "reward/mean": lambda s: 2 * (1 - math.exp(-s / 60)) + noise.gauss(0, 0.2),
        "reward/judge": lambda s: 2 * (1 - math.exp(-s / 60)) + noise.gauss(0, 0.2),
        "reward/gold": lambda s: 0.8 * (1 - math.exp(-s / 60)) + noise.gauss(0, 0.05),
        "kl/reference": lambda s: 8 * (1 - math.exp(-s / 60)) + noise.gauss(0, 0.3),
        "kl/sampler": lambda s: 0.0,
        "entropy": lambda s: 2.0 - 0.004 * s + noise.gauss(0, 0.05),
        "clip_fraction": lambda s: 0.1 + noise.gauss(0, 0.02),
        "length/mean": lambda s: 30 + 0.05 * s + noise.gauss(0, 1),
        "unfinished": lambda s: max(0.0, 0.05 + noise.gauss(0, 0.02)),
        "groups/equal": lambda s: 0.2,
        "loss/policy": lambda s: noise.gauss(0, 0.01),
    }


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_learns_gets_no_warning(seed):
    assert warnings(healthy(seed), steps=300) == []


SICK = {
    "entropy": (
        {"entropy": lambda s: 2.0 * math.exp(-s / 20)},
        r"entropy has fallen to 0\.\d+ nats a token, from 1\.7",
    ),
    "kl, slowly": ({"kl/reference": lambda s: 0.3 * s}, r"KL to the reference is 30(\.\d)? nats an answer"),
    "kl, at once": ({"kl/reference": lambda s: 2 if s < 60 else 20}, r"KL to the reference is 1\d(\.\d)? nats"),
    "hacking": (
        {"reward/gold": lambda s: 0.8 - 0.002 * s + 0.02 * (s % 2)},
        r"judge's reward rises .* gold reward fall",
    ),
    "longer": ({"length/mean": lambda s: 20 + s}, r"answers have become longer: 4\d(\.\d)? tokens"),
    "shorter": ({"length/mean": lambda s: max(2, 40 - s)}, r"answers have become shorter: \d+(\.\d)? tokens"),
    "unfinished, grown": ({"unfinished": lambda s: min(1.0, s / 100)}, r"2\d% of the answers are cut off .*\(3% at"),
    "unfinished, always": ({"unfinished": lambda s: 0.6}, r"60% of the answers are cut off by length"),
    "equal": ({"groups/equal": lambda s: 0.95}, r"in 95% of the groups all answers have the same reward"),
    "empty": ({"empty": lambda s: float(s % 10 > 0)}, r"nothing was learned in (80|100)% of the latest steps"),
    "clipped": ({"clip_fraction": lambda s: 0.4}, r"40% of the tokens are clipped"),
    "sampler, at once": ({"kl/sampler": lambda s: 0.005}, r"before the first update .* differ by 0\.005 nats"),
    "sampler, later": ({"kl/sampler": lambda s: 0.001 * (s - 1)}, r"differ by 0\.02\d* nats a token \(0 in the first"),
    "sampler, old": (
        {"kl/sampler": lambda s: 0.02 * (s - 1), "lag/mean": lambda s: float(s > 1)},
        r"differ by 0\.1\d* nats a token on samples that are 1 versions old",
    ),
    "starving": (
        {"time/batch": lambda s: 0.06 * s, "time/step": lambda s: 2 + 0.06 * s, "lag/mean": lambda s: float(s > 1)},
        r"idle for 5\d% of its time, waiting for samples",
    ),
    "not finite": ({"loss/policy": lambda s: math.nan if s > 30 else 0.1}, r"loss/policy is nan\. A loss or gradient"),
    "null": ({"loss/policy": lambda s: None}, r"loss/policy is None"),
}


@pytest.mark.parametrize("name", SICK)
def test_each_illness_is_named_and_no_other(name):
    series, words = SICK[name]
    found = warnings(healthy() | series, steps=120)
    assert found
    for step, text in found:  # nothing else is found
        assert text.startswith(f"Step {step}: ")
        assert re.search(words, text), text
    assert len(found) == 1 or name == "hacking"  # which is reminded of while it lasts, at most every fifty steps


def test_every_sign_has_an_example():
    assert len({words for _, words in SICK.values()}) >= len(SIGNS) + 1  # and the one on figures that are not finite


def test_it_warns_again_only_after_it_has_calmed_down():
    def clip(step):
        # High; hovering around the limit of 0.3, never below 0.8 of it; calm; high again.
        return 0.4 if step <= 20 else 0.26 + 0.06 * (step % 2) if step <= 80 else 0.1 if step <= 90 else 0.4

    # The first five figures suffice; at the end three of five at 0.4 and two at 0.1 make 0.28, four and one make 0.34.
    assert [step for step, _ in warnings({"clip_fraction": clip}, steps=120)] == [5, 94]


def test_it_does_not_repeat_itself_within_fifty_steps():
    # High and low in turns of ten steps: without the silence it would warn in every high turn, five times in all.
    found = [step for step, _ in warnings({"clip_fraction": lambda s: 0.5 if s % 20 < 10 else 0.0}, steps=100)]
    assert found[0] == 5
    assert all(later - earlier > 50 for earlier, later in itertools.pairwise(found))
    assert len(found) == 2


def test_falling_entropy_is_the_aim_of_supervised_training():
    assert warnings({"entropy": lambda s: 8.0 * math.exp(-s / 20), "loss/policy": lambda s: 1.0}, steps=100) == []


def test_gold_and_judge_that_fall_together_are_no_hacking():
    noise = random.Random(1)
    fall = {name: lambda s: -0.05 * s + noise.gauss(0, 0.1) for name in ("reward/judge", "reward/gold")}
    assert warnings(fall, steps=200) == []


def test_without_a_judge_the_whole_reward_is_compared_with_gold():
    series = {"reward/mean": lambda s: 0.1 * s + 0.01 * (s % 2), "reward/gold": lambda s: -0.1 * s + 0.01 * (s % 2)}
    ((step, text),) = warnings(series, steps=60)
    assert step == 20  # the shortest window that is looked at
    # Halves of steps 1 to 20: 0.1 * 5.5 + 0.005 and 0.1 * 15.5 + 0.005.
    assert "0.555 to 1.55 over 20 steps" in text or "0.555 to 1.56 over 20 steps" in text


def test_with_a_judge_it_is_the_judge_that_is_compared_with_gold():
    series = {"reward/mean": lambda s: 0.1 * s + 0.01 * (s % 2), "reward/gold": lambda s: -0.1 * s + 0.01 * (s % 2)}
    assert warnings(series | {"reward/judge": lambda s: 0.01 * (s % 2)}, steps=60) == []


@pytest.mark.parametrize(
    ("name", "begun", "fine", "ill"),
    [
        ("entropy", 4.0, 1.02, 0.98),  # a quarter
        ("entropy", 0.4, 0.102, 0.098),
        ("kl/reference", 29.0, 29.5, 30.5),
        ("kl/reference", 2.0, 9.8, 10.2),  # a jump to three times as much, from 10 on
        ("kl/reference", 5.0, 14.8, 15.2),
        ("length/mean", 30.0, 59.0, 61.0),
        ("length/mean", 30.0, 15.2, 14.8),
        ("unfinished", 0.45, 0.49, 0.51),
        ("unfinished", 0.05, 0.24, 0.26),  # 0.2 more, which are not few
        ("groups/equal", 0.1, 0.79, 0.81),
        ("empty", 0.1, 0.79, 0.81),
        ("clip_fraction", 0.1, 0.29, 0.31),
    ],
)
def test_each_sign_warns_from_its_limit_on(name, begun, fine, ill):
    for later, count in ((fine, 0), (ill, 1)):
        series = {"reward/mean": lambda s: 0.0, name: lambda s, later=later: begun if s <= 20 else later}
        assert len(warnings(series, steps=40)) == count


def test_constant_rewards_are_no_trend():
    assert warnings({"reward/judge": lambda s: 1.0, "reward/gold": lambda s: 0.0}, steps=100) == []


def test_a_restored_watch_goes_on_as_the_undisturbed_one():
    series = healthy(3) | {
        "entropy": SICK["entropy"][0]["entropy"],
        "clip_fraction": lambda s: 0.5 if s % 40 < 20 else 0,
    }
    records = [{"step": s} | {name: f(s) for name, f in series.items()} for s in range(1, 201)]
    whole, first, second = Health(), Health(), Health()
    expected = [whole.check(record) for record in records]
    assert sum(map(len, expected)) == 4  # three high turns of clipping, and entropy
    begun = [first.check(record) for record in records[:90]]
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + [second.check(record) for record in records[90:]] == expected


LAGGED = [0.0, 0.0564, 0.0387, 0.0242, 0.0212, 0.0225, 0.0162]  # the demo on Ray, rollout.max_lag=1


@pytest.mark.parametrize(
    ("gaps", "ages", "step"),
    [
        (LAGGED, [0, 1, 1, 1, 1, 1, 1], None),  # at most 0.0299 on average of five, 0.0282 / 0.06 in the second step
        (LAGGED, [0, 0, 0, 0, 0, 0, 0], 2),  # the mean of 0 and 0.0564 is above 0.02
        ([0.0, 0.121], [0, 1], 2),  # 0.0605 on average, half a version old: 0.02 + 0.08 / 2 = 0.06 are allowed
        ([0.0, 0.119], [0, 1], None),
        ([0.0, *[0.101] * 5], [0, *[1] * 5], 6),  # four of five make 0.081 of 0.084 at most, all of them 0.101 of 0.1
        ([0.0, *[0.101] * 5], [0, *[3] * 5], 6),  # older ones are allowed no more
        (
            [0.0, 0.11, 0.0, 0.0, 0.0, 0.0, 0.11],
            [0, 1, 0, 0, 0, 0, 0],
            7,
        ),  # 0.022 twice, in the end of nothing old
    ],
)
def test_old_samples_may_differ_by_what_was_learned_since(gaps, ages, step):
    series = {"kl/sampler": lambda s: gaps[s - 1], "lag/mean": lambda s: float(ages[s - 1])}
    found = warnings(series, steps=len(gaps))
    assert [when for when, _ in found] == ([] if step is None else [step])


def test_fresh_samples_may_not_differ_before_the_first_update_in_a_run_with_lag_either():
    ((step, text),) = warnings({"kl/sampler": lambda s: 0.002, "lag/mean": lambda s: float(s > 1)}, steps=20)
    assert step == 1
    assert "before the first update" in text and "0.002 nats" in text


def test_a_learner_that_waits_without_lag_does_not_starve():
    waiting = {"time/batch": lambda s: 9.0, "time/step": lambda s: 10.0}
    assert warnings(waiting | {"lag/mean": lambda s: 0.0}, steps=50) == []
    assert warnings(waiting, steps=50) == []  # offline
    ((step, _),) = warnings(waiting | {"lag/mean": lambda s: float(s > 1)}, steps=50)
    assert step == 10


def test_a_sign_that_says_nothing_of_a_run_is_left_out():
    record = {"step": 1, "kl/sampler": 0.5}
    assert len(Health().check(record)) == 1
    assert Health({"sampler"}).check(record) == []


def test_a_record_without_a_step_and_with_nothing_known_is_fine():
    assert Health().check({}) == []
    assert Health().check({"something/else": 3.0}) == []
