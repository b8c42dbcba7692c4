"""Recorded runs: healthy ones raise no alarm, and each rule catches a sick one in time. `scripts/health_runs.py` makes
them."""

from collections import Counter

import pytest
from health_runs import FRESH, FRESH_SEED, PAGE, RECORDED, SICK, caught, recorded, with_table

from plaudit.commands.options import METHODS
from plaudit.monitor.rules import RULES

HEALTHY_RUNS = {about["name"]: (about, records) for about, records in recorded("healthy.jsonl")}
FRESH_RUNS = {about["name"]: (about, records) for about, records in recorded("fresh.jsonl")}
SICK_RUNS = {about["name"]: (about, records) for about, records in recorded("sick.jsonl")}
WITHIN = 20
"""Steps within which a rule must catch its sick run."""


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_a_healthy_run_raises_no_alarm(name):
    assert caught(HEALTHY_RUNS[name][1]) == {}


@pytest.mark.parametrize("name", FRESH_RUNS)
def test_a_healthy_run_on_which_no_limit_was_set_raises_no_alarm(name):
    assert caught(FRESH_RUNS[name][1]) == {}


def test_each_method_has_three_healthy_runs():
    runs = Counter(about["recipe"].replace("_", "-") for about, _ in HEALTHY_RUNS.values())
    assert len(HEALTHY_RUNS) >= 30
    assert {method for method in METHODS if runs[method] < 3} == set()
    assert {"grpo_long_0", "rloo_long_0", "grpo_lag_0", "grpo_tools_0"} <= HEALTHY_RUNS.keys()
    assert FRESH_RUNS.keys() == {f"{name}_{FRESH_SEED}" for name in FRESH}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_catches_a_run_that_is_really_sick(rule):
    _, records = SICK_RUNS[rule.replace(" ", "_")]
    assert caught(records)[rule] <= WITHIN


def test_healthy_runs_are_not_healthy_for_want_of_figures():
    """Each rule's figures are in some healthy run, for as many steps as it needs."""
    for rule in RULES:
        counts = [sum(rule.reads[0] in record for record in records) for _, records in HEALTHY_RUNS.values()]
        assert max(counts) >= rule.least, rule.name


def test_sick_runs_are_those_of_the_script_and_files_are_small():
    assert SICK_RUNS.keys() == SICK.keys() == {rule.name.replace(" ", "_") for rule in RULES}
    assert sum(path.stat().st_size for path in RECORDED.iterdir()) < 600_000


def test_the_page_shows_when_each_rule_caught_its_run():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page
