"""Whole runs whose rollout worker is several processes, each with a part of every matrix."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import Kill, Killer
from kills import same_weights

from plaudit import load_settings, run

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "weights": "collective", "mesh": {"tensor": 2, "rollout_tensor": 2}}


def test_a_lost_process_of_a_rollout_worker_changes_nothing(make_recipe: Recipe, tmp_path: Path) -> None:
    """One that follows is killed while answers are drawn, one that leads while weights come. Sampler and learner, cut
    alike, agree; weights go to each process, by the object store or a collective."""
    more: dict[str, Any] = {"train": {"steps": 5}, "rollout": {"slots": 4}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", runtime=RAY | {"weights": "store"}, **more)))
    killer = Killer([Kill("rollout", "rollout", 1, which=1), Kill("rollout", "publish", 3, which=0)])
    with killer.at_work():
        disturbed = run(
            load_settings(make_recipe("grpo", tmp_path / "killed", runtime=RAY, **more)), hooks=[killer.hook]
        )
    assert [kill.victim for kill in killer.kills] == ["rollout worker 0, process 1", "rollout worker 0"]
    assert same_weights(whole, disturbed)
    said = (disturbed.folder / "log.txt").read_text()
    assert said.count("lost rollout worker 0: ") == 2
    assert "lost rollout worker 0: rollout worker 0, process 1: " in said
    assert said.count("rollout worker 0 is ready") == 2
    assert all(0 <= record["kl/sampler"] < 1e-6 for record in whole.metrics)


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_and_a_worker_of_two_processes_agree(rank: int, make_recipe: Recipe, tmp_path: Path) -> None:
    """As one process that samples, but for float32's rounding; also where only adapters are trained and sent."""
    model = {"lora": {"rank": rank}}
    local = run(load_settings(make_recipe("grpo", tmp_path / "local", model=model)))
    runtime = RAY | {"mesh": {"rollout_tensor": 2}, "weights": "store"}
    done = run(load_settings(make_recipe("grpo", tmp_path / "ray", runtime=runtime, model=model)))
    assert [one["completion"] for one in local.samples] == [one["completion"] for one in done.samples]
    assert all(0 <= record["kl/sampler"] < 1e-6 for record in done.metrics)
    assert "a local run gives the same bits" not in (done.folder / "log.txt").read_text()
