"""Whole runs whose calls are in other places, with real Ray processes: the result is that of the usual ones, also where
processes are killed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import Kill, Killer
from kills import same_weights
from safetensors.torch import load_file

from plaudit import Run, load_settings, run

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "heartbeat_timeout": 10.0}


def critic_of(done: Run) -> dict[str, Any]:
    newest = max((done.folder / "checkpoints" / "critic").iterdir(), key=lambda path: path.stat().st_mtime)
    return load_file(newest / "model.safetensors")


def policy_of(done: Run) -> dict[str, Any]:
    return load_file(done.model / "model.safetensors")


def test_a_critic_and_a_reference_on_ranks_of_their_own(make_recipe: Recipe, tmp_path: Path) -> None:
    """To the bit as in one process, though each kind of rank is killed; and a checkpoint continues elsewhere."""
    more: dict[str, Any] = {"train": {"steps": 5}, "save": {"every": 1}}
    whole = run(load_settings(make_recipe("ppo", tmp_path / "local", **more)))
    more["runtime"] = RAY | {"placement": {"critic": {"workers": 1}, "reference": {"workers": 2}}}
    kills = [Kill("reference", "rollout", 1, which=1), Kill("critic", "update", 2), Kill("rank", "apply", 3)]
    killer = Killer(kills)
    with killer.at_work():
        apart = run(load_settings(make_recipe("ppo", tmp_path / "apart", **more)), hooks=[killer.hook])
    assert killer.survived
    assert {kill.victim for kill in kills} == {"reference rank 1", "critic rank 0", "training rank 0"}
    assert same_weights(whole, apart)
    mine, theirs = critic_of(whole), critic_of(apart)
    assert all(mine[name].equal(theirs[name]) for name in mine)
    for here, there in zip(whole.metrics, apart.metrics, strict=True):
        for key in ("loss/policy", "loss/critic", "gradient_norm/critic", "kl/reference"):
            assert here.get(key) == there.get(key)


def test_a_larger_teacher_on_ranks_of_its_own(make_recipe: Recipe, tmp_path: Path) -> None:
    """To the bit as in one process: distillation without a reward."""
    recipe = make_recipe("distill", tmp_path / "local", train={"steps": 3}) | {"rewards": []}
    whole = run(load_settings(recipe))
    placed = RAY | {"placement": {"reference": {"workers": 2}}}
    apart = run(load_settings(recipe | {"runtime": placed, "output": str(tmp_path / "apart")}))
    assert same_weights(whole, apart)
    assert [one["kl/reference"] for one in whole.metrics] == [one["kl/reference"] for one in apart.metrics]


@pytest.mark.parametrize(
    ("critic", "reference"), [({"pipeline": 2}, {"context": 2}), ({"context": 2}, {"pipeline": 2})], ids=str
)
def test_a_critic_and_a_reference_in_stages_and_with_shared_rows(
    make_recipe: Recipe, tmp_path: Path, critic: dict[str, int], reference: dict[str, int]
) -> None:
    """As in one process, but for the order of sums, though a rank of each is killed."""
    more: dict[str, Any] = {"train": {"steps": 4}, "save": {"every": 1}, "optimizer": {"eps": 1e-3}}
    whole = run(load_settings(make_recipe("ppo", tmp_path / "local", **more)))
    more["runtime"] = RAY | {"placement": {"critic": {"mesh": critic}, "reference": {"mesh": reference}}}
    killer = Killer([Kill("critic", "update", 1, which=1), Kill("reference", "rollout", 2, which=1)])
    with killer.at_work():
        apart = run(load_settings(make_recipe("ppo", tmp_path / "apart", **more)), hooks=[killer.hook])
    assert killer.survived
    for here, there in ((critic_of(whole), critic_of(apart)), (policy_of(whole), policy_of(apart))):
        for name, tensor in here.items():
            torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-6)
    for here, there in zip(whole.metrics, apart.metrics, strict=True):
        for key in ("loss/policy", "loss/critic", "gradient_norm/critic", "kl/reference"):
            assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-6)


def test_ranks_that_train_parts_sample_from_whole_models(make_recipe: Recipe, tmp_path: Path) -> None:
    """To the bit as with a rollout worker, though ranks are killed while they sample and exchange weights."""
    more: dict[str, Any] = {"train": {"steps": 4}, "save": {"every": 1}, "runtime": {**RAY, "mesh": {"tensor": 2}}}
    worker = run(load_settings(make_recipe("grpo", tmp_path / "worker", **more)))
    more["runtime"] |= {"placement": {"generate": {"inside": "train"}}}
    killer = Killer([Kill("rank", "rollout", 1, which=1), Kill("rank", "publish", 2)])
    with killer.at_work():
        inside = run(load_settings(make_recipe("grpo", tmp_path / "inside", **more)), hooks=[killer.hook])
    assert killer.survived
    assert not [one for one in killer.workers if one.name.startswith("rollout")]
    assert [s["completion"] for s in worker.samples] == [s["completion"] for s in inside.samples]
    assert same_weights(worker, inside)


def test_ranks_that_train_adapters_in_parts_sample_from_all_of_them(make_recipe: Recipe, tmp_path: Path) -> None:
    """To the bit as with a rollout worker, which gets the same adapters."""
    more: dict[str, Any] = {"train": {"steps": 3}, "model": {"lora": {"rank": 2}}}
    more["runtime"] = {**RAY, "mesh": {"tensor": 2}}
    worker = run(load_settings(make_recipe("grpo", tmp_path / "worker", **more)))
    more["runtime"] |= {"placement": {"generate": {"inside": "train"}}}
    inside = run(load_settings(make_recipe("grpo", tmp_path / "inside", **more)))
    assert [s["completion"] for s in worker.samples] == [s["completion"] for s in inside.samples]
    assert same_weights(worker, inside)
    assert all(0 <= record["kl/sampler"] < 1e-6 for record in inside.metrics)


def test_a_rank_that_samples_is_a_local_run(make_recipe: Recipe, tmp_path: Path) -> None:
    """With adapters, on the very weights that are trained."""
    more: dict[str, Any] = {"model": {"lora": {"rank": 2}}}
    local = run(load_settings(make_recipe("ppo", tmp_path / "local", **more)))
    more["runtime"] = RAY | {"placement": {"generate": {"inside": "train"}, "reference": {"workers": 1}}}
    inside = run(load_settings(make_recipe("ppo", tmp_path / "inside", **more)))
    assert [s["completion"] for s in local.samples] == [s["completion"] for s in inside.samples]
    assert same_weights(local, inside)


def test_a_moving_reference_on_ranks_of_its_own_follows_its_policy(make_recipe: Recipe, tmp_path: Path) -> None:
    """To the bit as beside it, though one of its ranks is killed, after which it goes back to its checkpoint."""
    more: dict[str, Any] = {"train": {"steps": 4}, "save": {"every": 1}, "reference": {"ema": 0.3}}
    whole = run(load_settings(make_recipe("dpo", tmp_path / "local", **more)))
    more["runtime"] = RAY | {"placement": {"reference": {"workers": 2}}}
    killer = Killer([Kill("reference", "update", 2, which=1)])
    with killer.at_work():
        apart = run(load_settings(make_recipe("dpo", tmp_path / "apart", **more)), hooks=[killer.hook])
    assert [kill.victim for kill in killer.kills] == ["reference rank 1"]
    assert same_weights(whole, apart)
    assert same_weights(whole, apart, role="reference")
