"""Whole runs with real Ray processes: the same settings, the same loop, workers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install assent[ray]")

from faults import Kill, Killer
from safetensors.torch import load_file

from assent import Run, load_settings, run

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "object_store_mb": 100, "heartbeat_timeout": 10.0}


def same_weights(a: Run, b: Run) -> bool:
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_sft_on_two_ranks_learns_what_one_learns(make_recipe: Recipe, tmp_path: Path) -> None:
    alone = run(load_settings(make_recipe("sft", tmp_path / "local")))
    pair = run(load_settings(make_recipe("sft", tmp_path / "ray", runtime={**RAY, "num_training_workers": 2})))
    for mine, theirs in zip(alone.metrics, pair.metrics, strict=True):
        assert mine["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
        assert mine["gradient_norm/policy"] == pytest.approx(theirs["gradient_norm/policy"], rel=1e-4)


def test_grpo_with_two_rollout_workers(make_recipe: Recipe, tmp_path: Path) -> None:
    found = {}
    for kind, more in (("local", {}), ("ray", {"runtime": RAY, "rollout": {"workers": 2}})):
        found[kind] = run(load_settings(make_recipe("grpo", tmp_path / kind, **more)))
    assert [s["completion"] for s in found["local"].samples] == [s["completion"] for s in found["ray"].samples]
    assert same_weights(found["local"], found["ray"])


@pytest.mark.parametrize("method", ["grpo"])
def test_killed_processes_change_nothing(method: str, make_recipe: Recipe, tmp_path: Path) -> None:
    """A rollout worker and a rank, each in several phases: the run ends by itself, with the same weights to the bit."""
    more: dict[str, Any] = {"train": {"steps": 12}, "save": {"steps": 2}}
    whole = run(load_settings(make_recipe(method, tmp_path / "whole", **more)))
    kills = [
        Kill("rollout", "rollout", 1),
        Kill("rollout", "publish", 3),
        Kill("rank", "update", 4),
        Kill("rank", "rollout", 6),
        Kill("rollout", "update", 8),
        Kill("rank", "save", 9),
    ]
    killer = Killer(kills)
    ray = {"runtime": {**RAY, "max_failures": -1}, "rollout": {"workers": 2}}
    recipe = make_recipe(method, tmp_path / "killed", **more)
    recipe["runtime"], recipe["rollout"] = ray["runtime"], recipe["rollout"] | ray["rollout"]
    with killer.at_work():
        disturbed = run(load_settings(recipe), hooks=[killer.hook])
    print(killer.table())
    assert all(kill.at is not None and kill.found is not None and kill.next_step is not None for kill in kills)
    assert same_weights(whole, disturbed)
    assert [m["step"] for m in disturbed.metrics] == list(range(1, 13))
    assert [m["reward/mean"] for m in disturbed.metrics] == [m["reward/mean"] for m in whole.metrics]


def test_with_lag_generation_overlaps_and_old_samples_are_told(make_recipe: Recipe, tmp_path: Path) -> None:
    more = {"runtime": RAY, "rollout": {"workers": 2, "max_lag": 1}, "train": {"steps": 6}}
    done = run(load_settings(make_recipe("grpo", tmp_path, **more)))
    assert len(done.metrics) == 6
    assert all(record["lag/max"] <= 1.0 for record in done.metrics)
    assert any(record["lag/max"] == 1.0 for record in done.metrics)
    assert all("correction/mean" in record for record in done.metrics)
