"""Each sign warns on a series that shows it, once, and stays silent on healthy ones."""

import json
import math
import random
import re

import pytest

from plaudit.algorithms import ALGORITHMS
from plaudit.monitor.advice import advised
from plaudit.monitor.health import AWAY, Health, Ledger
from plaudit.monitor.rules import RULES, Series
from plaudit.monitor.settings import SIGNS, LogSettings
from plaudit.settings.recipes import defaults
from plaudit.support.fields import leaves


def warnings(series, *, steps):
    """All warnings, as (step, words), for metrics given as functions of the step."""
    health = Health()
    return [
        (step, alarm.text)
        for step in range(1, steps + 1)
        for alarm in health.alarms({"step": float(step), "time": 0.1 * step} | {n: f(step) for n, f in series.items()})
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_learns_gets_no_warning(seed):
    assert warnings(healthy(seed), steps=300) == []


SICK = {
    "entropy": (
        {"entropy": lambda s: max(0.3, 2.0 * math.exp(-s / 20))},
        r"entropy has fallen to 0\.\d+ nats per token, from 1\.7",
    ),
    "kl": ({"kl/reference": lambda s: 0.8 * s}, r"KL to the reference is [67]\d(\.\d)? nats per answer, 2 per token"),
    "idle reward": (
        {"reward/mean": lambda s: 0.1 * math.sin(s), "kl/reference": lambda s: min(20.0, 0.5 * s)},
        r"KL to the reference rises \(1\.5 to 1\d.* while the reward does not",
    ),
    "hacking": (
        {"reward/gold": lambda s: 0.8 - 0.002 * s + 0.02 * (s % 2)},
        r"trained reward rises .* while reward/gold falls",
    ),
    "length": (
        {
            "length/mean": lambda s: 20 + s,
            "reward/gold": lambda s: 0.8 - 0.002 * s + 0.02 * (s % 2),
            "reward/judge": lambda s: 0.0,
        },
        r"changed from 23 to \d+(\.\d)? tokens while reward/gold fell",
    ),
    "unfinished, grown": (
        {"unfinished": lambda s: min(0.4, s / 100)},
        r"2\d% of the answers are cut off .*\(3% at",
    ),
    "unfinished, always": ({"unfinished": lambda s: 0.6}, r"60% of the answers are cut off by length"),
    "turns, always": (
        {"episode/cut": lambda s: 0.6, "unfinished": lambda s: 0.7},
        r"60% of the episodes are cut off at environment\.max_turns \(60% at the start\)",
    ),
    "turns, grown": (
        {"episode/cut": lambda s: min(0.4, s / 100), "unfinished": lambda s: min(0.5, 0.1 + s / 100)},
        r"2\d% of the episodes are cut off .*\(3% at",
    ),
    "unfinished, beside turns": (
        {"episode/cut": lambda s: 0.1, "unfinished": lambda s: 0.7},
        r"60% of the answers are cut off by length",
    ),
    "no calls": (
        {"episode/calls": lambda s: float(s < 5), "episode/unread_calls": lambda s: 0.0},
        r"the policy made 0 calls of tools per episode in the latest 10 steps",
    ),
    "bad calls, unread": (
        {"episode/calls": lambda s: 1.0, "episode/unread_calls": lambda s: 1.0, "episode/failed_calls": lambda s: 0.1},
        r"50% of the calls of tools cannot be read and 5% fail",
    ),
    "bad calls, failed": (
        {"episode/calls": lambda s: 1.0, "episode/unread_calls": lambda s: 0.0, "episode/failed_calls": lambda s: 0.6},
        r"0% of the calls of tools cannot be read and 60% fail",
    ),
    "equal groups": ({"groups/equal": lambda s: 0.95}, r"in 95% of the groups all answers have the same reward"),
    "empty": ({"empty": lambda s: float(s % 10 > 0)}, r"nothing was learned in (80|100)% of the latest steps"),
    "clipping": ({"clip_fraction": lambda s: 0.4}, r"40% of the tokens are clipped"),
    "critic": ({"explained_variance": lambda s: -0.1}, r"explain -10% of the returns' variance"),
    "centring": (
        {"advantage/mean": lambda s: -0.9, "advantage/std": lambda s: 0.6},
        r"advantages are -0\.9 on average, with a deviation of 0\.6",
    ),
    "sampler, at once": (
        {"kl/sampler": lambda s: 0.0015},
        r"differ by 0\.0015 nats per token \(at most 0\.001 is usual; 0\.0015 in the first step\)",
    ),
    "sampler, later": (
        {"kl/sampler": lambda s: min(0.03, 0.001 * (s - 1))},
        r"differ by 0\.02\d* nats per token \(at most 0\.02 is usual; 0 in the first",
    ),
    "sampler, old": (
        {"kl/sampler": lambda s: min(0.15, 0.02 * (s - 1)), "lag/mean": lambda s: float(s > 1)},
        r"differ by 0\.1\d* nats .* on samples that are 1 versions old",
    ),
    "failed rewards": ({"reward/failed": lambda s: 0.03}, r"3\.0% of the answers have no reward"),
    "outage": ({"time/outage": lambda s: 7.0 * (s == 30)}, r"the step waited 7 s for rewards"),
    "skipped": ({"skipped": lambda s: float(s == 30)}, r"1 updates were skipped within 20 steps"),
    "halted": ({"halted": lambda s: float(s > 20 and s % 2)}, r"the early stop ended 5 of 10 steps"),
    "starving": (
        {"time/batch": lambda s: 0.06 * s, "time/step": lambda s: 2 + 0.06 * s, "lag/mean": lambda s: float(s > 1)},
        r"idle for 5\d% of its time, waiting for samples",
    ),
    "idle rollout": (
        {"time/rollout_idle": lambda s: 8.0, "time/step": lambda s: 10.0, "lag/mean": lambda s: float(s > 1)},
        r"no answer is being generated for 80% of the time",
    ),
    "not finite": ({"loss/policy": lambda s: math.nan if s > 30 else 0.1}, r"loss/policy is nan\. A loss or gradient"),
    "null": ({"loss/policy": lambda s: None}, r"loss/policy is None"),
}


@pytest.mark.parametrize("name", SICK)
def test_each_illness_is_named_once_and_no_other(name):
    series, words = SICK[name]
    ((_, text),) = warnings(healthy() | series, steps=120)
    assert re.search(words, text), text


def test_a_loss_that_rises_without_rewards_is_named():
    series = {"loss/policy": lambda s: 0.7 if s < 30 else 1.2}
    ((step, text),) = warnings(series, steps=120)
    assert step == 33 and "the loss is 1.1, from 0.7 at the start" in text  # four of five at 1.2; the limit is 1.05
    assert warnings(series | {"reward/mean": lambda s: 0.0}, steps=120) == []  # a policy gradient's measures nothing


def test_every_rule_has_an_example():
    named = {name.partition(",")[0] for name in SICK} | {"loss"}
    assert {rule.name for rule in RULES} <= named


def test_it_warns_again_only_after_it_went_away():
    def clip(step):
        # High; hovering around the limit of 0.3, never below 0.8 of it; calm; high again.
        return 0.4 if step <= 20 else 0.26 + 0.06 * (step % 2) if step <= 80 else 0.1 if step <= 110 else 0.4

    # The first five figures suffice; at the end three of five at 0.4 and two at 0.1 make 0.28, four and one make 0.34.
    assert [step for step, _ in warnings({"clip_fraction": clip}, steps=120)] == [5, 114]


def test_it_has_not_gone_away_after_a_few_calm_steps():
    # High and low in turns: the mean of five is calm for fewer than AWAY of them.
    flicker = {"clip_fraction": lambda s: 0.5 if s % 36 < 18 else 0.0}
    assert AWAY == 20
    assert [step for step, _ in warnings(flicker, steps=200)] == [5]


def test_it_warns_again_when_it_is_twice_as_bad():
    # 0.4 of 0.3; three of five at 0.9 make 0.7, which is below 0.8, and four make 0.8.
    assert [step for step, _ in warnings({"clip_fraction": lambda s: 0.4 if s < 50 else 0.9}, steps=120)] == [5, 53]


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
        ("reward/failed", 0.0, 0.019, 0.021),
        ("unfinished", 0.45, 0.49, 0.51),
        ("unfinished", 0.05, 0.24, 0.26),  # 0.2 more, which are not few
        ("groups/equal", 0.1, 0.79, 0.81),
        ("empty", 0.1, 0.79, 0.81),
        ("clip_fraction", 0.1, 0.29, 0.31),
    ],
)
def test_each_rule_warns_from_its_limit_on(name, begun, fine, ill):
    for later, count in ((fine, 0), (ill, 1)):
        series = {"reward/mean": lambda s: 0.0, name: lambda s, later=later: begun if s <= 20 else later}
        assert len(warnings(series, steps=40)) == count


@pytest.mark.parametrize("tokens", [10, 1000])
@pytest.mark.parametrize(("share", "count"), [(0.9, 0), (1.1, 1)])
def test_kl_is_measured_by_token_against_the_entropy_at_the_start(tokens, share, count):
    series = {"entropy": lambda s: 0.5, "length/mean": lambda s: float(tokens), "reward/mean": lambda s: 0.1 * s}
    assert len(warnings(series | {"kl/reference": lambda s: share * 0.5 * tokens}, steps=20)) == count


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_the_scale_of_rewards_changes_nothing(factor):
    series = healthy(2) | SICK["hacking"][0]
    scaled = {n: (lambda s, f=f: factor * f(s)) if n.startswith("reward/") else f for n, f in series.items()}
    ((step, _),) = warnings(scaled, steps=120)
    assert step == 21


@pytest.mark.parametrize("gold", [None, lambda s: 0.01 * s + 0.01 * (s % 2), lambda s: 0.01 * (s % 2)])
def test_length_is_no_sign_unless_a_held_out_reward_falls(gold):
    series = {"length/mean": lambda s: 10.0 + s, "reward/mean": lambda s: 0.1 * s}
    assert warnings(series | ({} if gold is None else {"reward/gold": gold}), steps=100) == []


def test_a_held_out_judge_takes_the_place_of_gold():
    health = Health(truths=["reward/gold", "reward/second"])
    found = []
    for s in range(1, 60):
        figures = {"length/mean": 10.0 + s, "reward/mean": 0.0, "reward/second": -0.1 * s + 0.01 * (s % 2)}
        found += health.alarms(figures)
    assert [alarm.sign for alarm in found] == ["length"]
    assert found[0].numbers["truth"] == "reward/second" and "reward/second fell" in found[0].saw


def test_an_alarm_is_plain_json_with_what_it_saw():
    health = Health()
    (alarm,) = [one for _ in range(5) for one in health.alarms({"clip_fraction": 0.4})]
    record = json.loads(json.dumps(alarm.record))
    assert record["sign"] == "clipping" and record["numbers"] == {"now": 0.4, "start": 0.4}
    assert record["severity"] == pytest.approx(0.4 / 0.3)
    assert alarm.text == " ".join(record[part] for part in ("saw", "why", "advice"))


@pytest.mark.parametrize(("moved", "count"), [(0.001, 0), (0.019, 0), (0.021, 1)])
def test_a_narrow_clip_of_a_policy_that_hardly_moves_is_no_sign(moved, count):
    assert len(warnings({"clip_fraction": lambda s: 0.5, "kl/old": lambda s: moved}, steps=40)) == count


def test_constant_rewards_are_no_trend():
    assert warnings({"reward/judge": lambda s: 1.0, "reward/gold": lambda s: 0.0}, steps=100) == []


@pytest.mark.slow
def test_a_resumed_watch_goes_on_as_the_undisturbed_one():
    series = healthy(3) | {"entropy": SICK["entropy"][0]["entropy"]}
    series |= {"clip_fraction": lambda s: 0.5 if s % 100 < 50 else 0.0}
    records = [{"step": s} | {name: f(s) for name, f in series.items()} for s in range(1, 701)]
    whole, second = Health(), Health()
    expected = [whole.alarms(record) for record in records]
    assert sum(map(len, expected)) > 7
    second.resume(records[:600])
    assert [second.alarms(record) for record in records[600:]] == expected[600:]


def test_a_series_keeps_its_beginning_and_what_is_new():
    series = Series()
    for value in range(1000):
        series.add(float(value))
    assert (series.start, series.now, series.count) == (2.0, 997.0, 1000)
    assert series.latest == [float(value) for value in range(840, 1000)]


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
    assert "0.002 nats per token (at most 0.001" in text


def test_a_learner_that_waits_without_lag_does_not_starve():
    waiting = {"time/batch": lambda s: 9.0, "time/step": lambda s: 10.0}
    assert warnings(waiting | {"lag/mean": lambda s: 0.0}, steps=50) == []
    assert warnings(waiting, steps=50) == []  # offline
    ((step, _),) = warnings(waiting | {"lag/mean": lambda s: float(s > 1)}, steps=50)
    assert step == 10


def test_a_sign_that_says_nothing_of_a_run_is_left_out():
    record = {"step": 1, "kl/sampler": 0.5}
    assert len(Health().alarms(record)) == 1
    assert Health({"sampler"}).alarms(record) == []


def test_a_record_without_a_step_and_with_nothing_known_is_fine():
    assert Health().alarms({}) == []
    assert Health().alarms({"something/else": 3.0}) == []


LINES = [
    {"step": 20, "sign": "clipping", "severity": 1.2, "saw": "40% of the tokens are clipped.", "numbers": {"now": 0.4}},
    {"step": 25, "sign": "clipping", "severity": 1.1},
    {"step": 30, "sign": "entropy", "severity": 1.0, "saw": "entropy has fallen."},
    {
        "step": 54,
        "sign": "clipping",
        "severity": 2.5,
        "saw": "83% of the tokens are clipped.",
        "numbers": {"now": 0.83},
    },
]


def test_a_sign_is_one_entry_with_its_steps():
    ledger = Ledger()
    assert [ledger.add(line) for line in LINES] == [True, False, True, False]  # numbers make no new words
    clipping, entropy = ledger.entries.values()
    assert clipping == LINES[3] | {"step": 20, "last": 54, "count": 3}
    assert entropy == LINES[2] | {"last": 30, "count": 1}
    assert ledger.spans(60) == [
        "steps 20 to 54 (3 of 35): 83% of the tokens are clipped.",
        "step 30: entropy has fallen.",
    ]
    assert ledger.spans(30) == ["steps 20 to 54 (3 of 35): 83% of the tokens are clipped."]  # just told
    assert not Ledger(LINES).add(LINES[2] | {"step": 99})  # nor after a resume
    assert ledger.add({"step": 61, "sign": "clipping", "saw": "no token is clipped any more."})


def test_signs_that_last_are_present_and_dismissed_ones_are_not():
    health = Health(["entropy", "not finite"])
    figures = {"clip_fraction": 0.4, "entropy": 1.0, "reward/mean": 0.0}
    found = [health.alarms(figures | {"entropy": 1.0 if step < 10 else 0.0}) for step in range(30)]
    assert [alarm.sign for alarms in found for alarm in alarms] == ["clipping"]
    assert health.present == {"clipping": pytest.approx(0.4 / 0.3)}
    assert health.alarms({"loss/policy": math.nan}) == []
    health.alarms({"clip_fraction": 0.0})
    assert [health.alarms({"clip_fraction": 0.0}) for _ in range(4)][-1] == [] and health.present == {}


REWARDS = [
    ({"short": "passed:short:1"}, "the reward short"),
    ({"gsm8k": "gsm8k", "short": "function"}, "the rewards gsm8k and short"),
    ({"judge": "judge"}, "the judge"),
    ({}, "the reward"),
]


@pytest.mark.parametrize(("rewards", "words"), REWARDS)
def test_a_sentence_names_the_rewards_that_there_are(rewards, words):
    hacking = {"reward/mean": lambda s: 0.1 * s + 0.01 * (s % 2), "reward/gold": lambda s: -0.1 * s + 0.01 * (s % 2)}
    health = Health(rewards=rewards, settings={"algorithm.kl_in_loss": 0.04})
    (alarm,) = [one for s in range(1, 21) for one in health.alarms({name: f(s) for name, f in hacking.items()})]
    assert alarm.why == f"The policy usually exploits mistakes of {words}."
    assert alarm.advice.endswith(f"read what {words} gives much for.")
    assert ("train the judge" in alarm.advice) == (not rewards or "judge" in rewards.values())
    assert "raise algorithm.kl_in_loss (now 0.04)" in alarm.advice


@pytest.mark.parametrize(
    ("item", "settings", "told"),
    [
        ("raise a.kl | a.loss", {"a.kl": 0.0, "a.loss": 0.04}, "Raise a.loss (now 0.04)."),
        ("raise a.kl | a.loss", {"a.loss": 0.0}, "Set a.loss."),
        ("raise a.kl | a.loss", {"b.kl": 1}, ""),
        ("raise a.kl | a.loss", None, "Raise a.kl or a.loss."),
        ("lower a.lag", {"a.lag": 0}, ""),
        ("lower a.epochs", {"a.epochs": 1}, ""),
        ("lower a.rate, at once", {"a.rate": 0.5}, "Lower a.rate (now 0.5), at once."),
        ("widen a.clip", {"a.clip": (0.2, 0.3)}, "Widen a.clip (now [0.2, 0.3])."),
        ("set a.on=true", {"a.on": True}, ""),
        ("set a.on=true", {"a.on": False}, "Set a.on=true."),
        ("set a.path", {"a.path": "runs/judge"}, ""),
        ("centre: set a.shift", {"a.shift": 0.0}, "Centre: set a.shift."),
        ("change a.end=score to penalty", {"a.end": "score"}, "Change a.end=score to penalty."),
        ("change a.end=score to penalty", {"a.end": -0.5}, ""),
    ],
)
def test_advice_names_the_present_value_and_nothing_that_is_set(item, settings, told):
    assert advised([item], settings, {}) == told


def test_advice_names_settings_that_there_are():
    known = {leaf.key for method in ALGORITHMS for leaf in leaves(defaults(method))}
    named = {key for rule in RULES for item in rule.advice for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", str(item))}
    assert len(named) > 15
    assert named - known == {"samples.jsonl"}


def test_an_unknown_sign_is_not_dismissed_in_silence():
    assert SIGNS[:-3] == tuple(rule.name for rule in RULES)
    told = list(LogSettings(dismiss=["clipping", "not finite", "cliping", "reward"]).contradictions())
    assert told == [
        "dismiss has no 'cliping'; did you mean clipping?",
        "dismiss has no 'reward'; did you mean idle reward?",
    ]


def test_steps_that_take_longer_than_planned_name_the_part() -> None:
    """Planned are 28 s, of which rewards take 2; they take 15. The first step, which is slow, does not count."""
    planned = {"step": 28.0, "generate": 10.0, "rewards": 2.0, "learn": 15.0}
    usual = {"time/step": 28.0, "time/generate": 11.0, "time/rewards": 2.0, "time/learn": 15.0}
    health = Health(planned=planned)
    assert [health.alarms(usual | {"time/step": 500.0})] + [health.alarms(usual) for _ in range(20)] == [[]] * 21
    found = [alarm for _ in range(20) for alarm in health.alarms(usual | {"time/step": 41.0, "time/rewards": 15.0})]
    assert [alarm.saw for alarm in found] == ["a step takes 41 s, planned 28 s: rewards take 13 s more than profiled."]
    assert found[0].numbers["part"] == "rewards"
    assert not [one for _ in range(20) for one in Health().alarms(usual | {"time/step": 99.0})]
