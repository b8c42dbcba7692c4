"""Whole runs with real Ray processes: the same settings, the same loop, workers elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import GPT2

pytest.importorskip("ray", reason="ray is not installed: pip install assent[ray]")

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
