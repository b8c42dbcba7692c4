"""Whole runs on Ray by each way that weights take to rollout workers, whole and as adapters: equal to the local run."""

from __future__ import annotations

import signal
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
RAY = {"kind": "ray", "heartbeat_timeout": 3.0, "max_failures_per_hour": -1}
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
    more: dict[str, Any] = {"model": ADAPTERS, "train": {"steps": 10}, "save": {"every": 2}}
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


@pytest.mark.parametrize("way", ["store", "collective"])
def test_what_is_lost_between_changes_leaves_no_trace(way: str, make_recipe: Recipe, tmp_path: Path) -> None:
    """In bfloat16, of which a step at 1e-6 changes few numbers: those who come later, or with other ranks, get all."""
    more: dict[str, Any] = {"train": {"steps": 8}, "save": {"every": 2}, "learn": {"precision": "bfloat16"}}
    more["optimizer"] = {"learning_rate": 1e-6}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    more |= {"runtime": {**RAY, "weights": way}, "rollout": {"workers": 2}}
    killer = Killer([Kill("rollout", "rollout", 1), Kill("rollout", "publish", 3), Kill("rank", "publish", 5)])
    with killer.at_work():
        disturbed = run(load_settings(make_recipe("grpo", tmp_path / "killed", **more)), hooks=[killer.hook])
    print("\n".join(kill.row() for kill in killer.kills))
    assert killer.survived
    assert same_weights(whole, disturbed)
    shares = [step["publish/share"] for step in disturbed.metrics if "publish/share" in step]
    assert len(shares) == 8
    print(shares)
    assert shares[0] <= 0.1, "a fresh model's biases, all of them zeros, move at once"
    assert max(shares[1:]) <= 0.05
    assert "publish/share" not in whole.metrics[-1]


FAULTY = '''
import os
from pathlib import Path

import plaudit.executors.publisher
from plaudit.rollout import accepted
from plaudit.rollout.worker import RolloutWorker
from plaudit.weights.packed import PackedWeights

loads, holds, packs = RolloutWorker.load, accepted.check_held, plaudit.executors.publisher.pack


def first(fault):
    """True once over all processes."""
    try:
        os.close(os.open(Path(__file__).with_name(fault), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def flipped(packed):
    buckets = [bucket.clone() for bucket in packed.buckets]
    entry = packed.entries[-1]
    buckets[entry.bucket][entry.start] ^= 1
    return PackedWeights(packed.version, packed.digest, packed.entries, tuple(buckets), packed.beneath)


async def load(self, attempt, packed):
    if packed.version == 1 and first("on its way"):
        packed = flipped(packed)
    if packed.version == 2 and first("stale"):
        return 1, "of an old engine"
    return await loads(self, attempt, packed)


def check_held(held, weights):
    if Path(__file__).with_name("stale").exists() and first("in the engine's memory"):
        next(iter(held.values())).detach().view(-1)[0].add_(1.0)
    holds(held, weights)


def pack(weights, version, **more):
    packed = packs(weights, version, **more)
    return flipped(packed) if version == 4 and first("where it lies") else packed


RolloutWorker.load, accepted.check_held, plaudit.executors.publisher.pack = load, check_held, pack
'''
FAULTS = ("on its way", "stale", "in the engine's memory", "where it lies")


def test_workers_without_the_newest_weights_are_replaced_and_leave_no_trace(
    make_recipe: Recipe, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"train": {"steps": 8}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    more |= {"runtime": RAY, "rollout": {"workers": 2}, "plugins": [str(plugin)]}
    disturbed = run(load_settings(make_recipe("grpo", tmp_path / "faulty", **more)))
    assert [fault for fault in FAULTS if not (tmp_path / fault).exists()] == []
    lost = [line for line in (disturbed.folder / "log.txt").read_text().splitlines() if " lost rollout worker" in line]
    print("\n".join(lost))
    assert len(lost) >= len(FAULTS), "the last fault costs all workers that are there"
    assert all("does not hold the newest weights" in line for line in lost)
    assert same_weights(whole, disturbed)
