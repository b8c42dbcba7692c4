"""Learner and engine that take turns on the same devices: the result is that of devices of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from plaudit import Run, SettingsError, load_settings, run
from plaudit.executors.local import LocalExecutor

Recipe = Callable[..., dict[str, Any]]
TURNS = {"generate": {"shares": "train"}}


def weights(done: Run) -> bytes:
    [file] = done.model.glob("*.safetensors")
    return file.read_bytes()


def test_a_local_run_is_the_same(make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the learner works the engine has no cache; its next answers are those that it would have given."""
    executors, caches = list[LocalExecutor](), list[bool]()
    begin, learn = LocalExecutor.__init__, "plaudit.loop.train.learn"

    def begun(executor: LocalExecutor, *given: Any) -> None:
        begin(executor, *given)
        executors.append(executor)

    from plaudit.loop.train import learn as learned

    async def watched(*given: Any, **named: Any) -> Any:
        caches.append(executors[-1].engine.table is not None)  # type: ignore[union-attr]
        return await learned(*given, **named)

    monkeypatch.setattr(LocalExecutor, "__init__", begun)
    monkeypatch.setattr(learn, watched)
    more: dict[str, Any] = {"evaluate": {"every": 2}}
    apart = run(load_settings(make_recipe("ppo", tmp_path / "apart", **more)))
    shared = run(load_settings(make_recipe("ppo", tmp_path / "shared", runtime={"placement": TURNS}, **more)))
    assert caches == [True] * 4 + [False] * 4
    assert [s["completion"] for s in apart.samples] == [s["completion"] for s in shared.samples]
    assert weights(apart) == weights(shared)


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_two_ranks_and_three_rollout_workers_on_their_places(make_recipe: Recipe, tmp_path: Path) -> None:
    """More processes than there would be room for apart, and the figures of a local run. It ends alike to the bit where
    an idle rank is killed while rollout workers answer, which is found once they sleep, and then a sleeping rollout
    worker and a rank while ranks work."""
    from faults import Kill, Killer

    local = run(load_settings(make_recipe("grpo", tmp_path / "local")))
    more: dict[str, Any] = {"rollout": {"workers": 3}, "save": {"every": 1}}
    more["runtime"] = {"kind": "ray", "num_training_workers": 2, "placement": TURNS}
    more["runtime"]["resources_per_worker"] = {"CPU": 1}
    calm = run(load_settings(make_recipe("grpo", tmp_path / "calm", **more)))
    kills = [Kill("rank", "rollout", 1, which=1), Kill("rollout", "update", 2), Kill("rank", "update", 3)]
    killer = Killer(kills)
    with killer.at_work():
        shared = run(load_settings(make_recipe("grpo", tmp_path / "shared", **more)), hooks=[killer.hook])
    assert killer.survived
    assert weights(shared) == weights(calm)
    assert [s["completion"] for s in local.samples] == [s["completion"] for s in shared.samples]
    for mine, theirs in zip(local.metrics, shared.metrics, strict=True):
        assert mine["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
        assert mine["gradient_norm/policy"] == pytest.approx(theirs["gradient_norm/policy"], rel=1e-4)
        assert theirs["kl/sampler"] == pytest.approx(0.0, abs=1e-9)


def test_what_rollout_workers_would_reserve_apart_is_refused(make_recipe: Recipe, tmp_path: Path) -> None:
    runtime = {"kind": "ray", "resources_per_rollout_worker": {"CPU": 1}, "placement": TURNS}
    with pytest.raises(SettingsError, match=r"placement\.generate.*resources_per_rollout_worker"):
        run(load_settings(make_recipe("grpo", tmp_path, runtime=runtime)))
