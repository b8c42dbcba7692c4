"""Whole runs whose samples may be old, in this process; with real Ray processes they are in test_ray_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from assent import Run, load_settings, run

Recipe = Callable[..., dict[str, Any]]


def same_weights(first: Run, second: Run) -> bool:
    ours, theirs = (load_file(found.model / "model.safetensors") for found in (first, second))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("interrupt", [True, False])
def test_new_weights_take_over_answers_under_way_or_wait_for_their_end(
    make_recipe: Recipe, tmp_path: Path, interrupt: bool
) -> None:
    rollout = {"max_lag": 1, "interrupt": interrupt, "slots": 4, "max_tokens": 16}
    done = run(
        load_settings(make_recipe("grpo", tmp_path, rollout=rollout, train={"steps": 8}, log={"sample_groups": 9}))
    )
    versions = [sample["versions"] for sample in done.samples]
    assert any(len(mixed) > 1 for mixed in versions) == interrupt
    assert len({version for mixed in versions for version in mixed}) > 4
    assert all(record["lag/max"] <= 1 for record in done.metrics)


def test_without_lag_interrupt_makes_no_difference(make_recipe: Recipe, tmp_path: Path) -> None:
    runs = [
        run(load_settings(make_recipe("grpo", tmp_path / str(interrupt), rollout={"interrupt": interrupt})))
        for interrupt in (True, False)
    ]
    assert same_weights(*runs)
