"""The terminal's line of a step."""

from __future__ import annotations

from assent.monitor.console import Reporter, step_line


def test_age_and_gap_of_samples_are_shown_where_there_are_any() -> None:
    with Reporter(quiet=True).track("grpo", 4, done=0) as tracker:
        tracker.advance()
        fresh = step_line({"loss/policy": 0.5, "lag/mean": 0.0, "kl/sampler": 1e-14}, tracker)
        old = step_line({"loss/policy": 0.5, "lag/mean": 0.75, "kl/sampler": 2e-3}, tracker)
    assert "loss 0.5000" in fresh
    assert "lag" not in fresh
    assert "gap" not in fresh
    assert "lag 0.75  gap 2.0e-03" in old


def test_what_rounds_to_nothing_has_no_sign() -> None:
    record = {"loss/policy": -1e-9, "reward/mean": -1e-9, "kl/reference": -1e-7, "validation/margin": -1e-9}
    with Reporter(quiet=True).track("reinforce", 4) as tracker:
        line = step_line(record, tracker)
    assert "loss 0.0000  reward +0.000  kl 0.00  validation/margin 0.0000" in line
