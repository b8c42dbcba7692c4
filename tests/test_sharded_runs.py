"""Whole runs whose model is spread over training ranks, with real Ray processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install plaudit[ray]")

from safetensors.torch import load_file

from plaudit import Run, load_settings, run

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "object_store_mb": 100, "strategy": "fsdp", "num_training_workers": 2}


def furthest(a: Run, b: Run) -> float:
    """The largest difference of any weight."""
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_grpo_on_sharded_ranks_and_on_from_their_checkpoint_on_one(make_recipe: Recipe, tmp_path: Path) -> None:
    """The sampler gets weights put together from shards; the last step is done by another number of ranks."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "algorithm": {"kl_in_loss": 0.05}, "save": {"steps": 2}}
    alone = run(load_settings(make_recipe("grpo", tmp_path / "alone", **more)))
    pair = run(load_settings(make_recipe("grpo", tmp_path / "ray", **more, runtime=RAY)))
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in pair.samples]
    assert furthest(alone, pair) < 1e-6
    longer = {**more, "train": {"steps": 6}}
    further = [
        run(load_settings({**make_recipe("grpo", tmp_path / name, **longer), "resume": "latest"}))
        for name in ("alone", "ray")
    ]
    assert [m["step"] for m in further[1].metrics] == list(range(1, 7))
    assert furthest(*further) < 1e-6
