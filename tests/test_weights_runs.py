"""Whole runs on Ray by each way that weights take to rollout workers, whole and as adapters: equal to the local run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install plaudit[ray]", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from faults import Kill, Killer
from kills import same_weights

from plaudit import load_settings, run

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "object_store_mb": 100, "heartbeat_timeout": 3.0, "max_failures": -1}
ADAPTERS = {"lora": {"rank": 2}}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "adapters by the store": ("store", {"model": ADAPTERS}),
    "all by a collective": ("collective", {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_synchronous_run_equals_the_local_one(way: str, make_recipe: Recipe, tmp_path: Path) -> None:
    weights, more = WAYS[way]
    apart = {"runtime": {**RAY, "weights": weights}, "rollout": {"workers": 2}}
    local, ray = (
        run(load_settings(make_recipe("grpo", tmp_path / name, **more, **where)))
        for name, where in (("local", {}), ("ray", apart))
    )
    assert [s["completion"] for s in local.samples] == [s["completion"] for s in ray.samples]
    assert same_weights(local, ray)


def test_what_is_lost_while_adapters_are_broadcast_leaves_no_trace(make_recipe: Recipe, tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": ADAPTERS, "train": {"steps": 10}, "save": {"steps": 2}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    more |= {"runtime": {**RAY, "weights": "collective"}, "rollout": {"workers": 3}}
    killer = Killer(
        [
            Kill("rollout", "publish", 1),
            Kill("rollout", "publish", 3, signal=signal.SIGSTOP, which=1),
            Kill("rank", "publish", 5),
        ]
    )
    with killer.at_work():
        disturbed = run(load_settings(make_recipe("grpo", tmp_path / "killed", **more)), hooks=[killer.hook])
    print("\n".join(kill.row() for kill in killer.kills))
    assert killer.survived
    assert same_weights(whole, disturbed)
