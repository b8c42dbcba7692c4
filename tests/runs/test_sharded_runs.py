"""Whole runs whose model is spread over training ranks, in shards, cut or in stages, with real Ray processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")

from faults import Kill, Killer
from kills import same_weights
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.runtime.memory import RankOutOfMemory

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "strategy": "fsdp", "num_training_workers": 2}
CUT = {"kind": "ray", "mesh": {"tensor": 2}}
STAGES = {**CUT, "mesh": {"pipeline": 2}}


def furthest(a: Run, b: Run) -> float:
    """The largest difference of any weight."""
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_grpo_on_sharded_ranks_and_on_from_their_checkpoint_on_one(make_recipe: Recipe, tmp_path: Path) -> None:
    """The sampler gets each rank's shards by a broadcast; the last step is done by another number of ranks."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "algorithm": {"kl_in_loss": 0.05}, "save": {"every": 2}}
    alone = run(load_settings(make_recipe("grpo", tmp_path / "alone", **more)))
    pair = run(load_settings(make_recipe("grpo", tmp_path / "ray", **more, runtime={**RAY, "weights": "collective"})))
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in pair.samples]
    assert furthest(alone, pair) < 1e-6
    longer = {**more, "train": {"steps": 6}}
    further = [
        run(load_settings({**make_recipe("grpo", tmp_path / name, **longer), "resume": "latest"}))
        for name in ("alone", "ray")
    ]
    assert [m["step"] for m in further[1].metrics] == list(range(1, 7))
    assert furthest(*further) < 1e-6


@pytest.mark.parametrize("runtime", [CUT, STAGES], ids=["matrices", "stages"])
def test_ppo_on_ranks_with_parts_and_on_from_their_checkpoint_on_one(
    runtime: dict[str, Any], make_recipe: Recipe, tmp_path: Path
) -> None:
    """Policy, critic and reference are cut; the sampler gets each rank's parts through the object store."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "critic": {"learning_rate": 0.003}, "save": {"every": 2}}
    alone = run(load_settings(make_recipe("ppo", tmp_path / "alone", **more)))
    pair = run(load_settings(make_recipe("ppo", tmp_path / "ray", **more, runtime=runtime)))
    assert "2 training and 1 rollout workers are ready" in (pair.folder / "log.txt").read_text()
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in pair.samples]
    assert all(abs(record["kl/sampler"]) < 1e-6 for record in pair.metrics), "sampler and learner agree"
    assert furthest(alone, pair) < 1e-6
    longer = {**more, "train": {"steps": 6}}
    further = [
        run(load_settings({**make_recipe("ppo", tmp_path / name, **longer), "resume": "latest"}))
        for name in ("alone", "ray")
    ]
    assert [m["step"] for m in further[1].metrics] == list(range(1, 7))
    assert furthest(*further) < 1e-6


def test_grpo_on_ranks_that_share_the_tokens_of_each_pass(make_recipe: Recipe, tmp_path: Path) -> None:
    """Answers to a prompt share its tokens, wherever these are cut."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "algorithm": {"kl_in_loss": 0.05}}
    alone = run(load_settings(make_recipe("grpo", tmp_path / "alone", **more)))
    pair = run(load_settings(make_recipe("grpo", tmp_path / "ray", **more, runtime=CUT | {"mesh": {"context": 2}})))
    assert "2 training and 1 rollout workers are ready" in (pair.folder / "log.txt").read_text()
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in pair.samples]
    assert all(abs(record["kl/sampler"]) < 1e-6 for record in pair.metrics), "sampler and learner agree"
    assert furthest(alone, pair) < 1e-6


def test_adapters_of_ranks_that_share_each_matrix_reach_the_sampler(make_recipe: Recipe, tmp_path: Path) -> None:
    """Only they travel, and the sampler's model is the ranks' by its digest."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "train": {"steps": 3}, "model": {"lora": {"rank": 3}}}
    alone = run(load_settings(make_recipe("grpo", tmp_path / "alone", **more)))
    pair = run(load_settings(make_recipe("grpo", tmp_path / "ray", **more, runtime={**CUT, "weights": "collective"})))
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in pair.samples]
    assert furthest(alone, pair) < 1e-6


@pytest.mark.parametrize(
    ("weights", "parts", "phase"),
    [("store", CUT, "publish"), ("collective", CUT, "publish"), ("store", STAGES, "update")],
)
def test_what_is_lost_while_parts_are_published_leaves_no_trace(
    weights: str, parts: dict[str, Any], phase: str, make_recipe: Recipe, tmp_path: Path
) -> None:
    """Every rank gives a part: the loss of any rank ends the update, and that of a rollout worker does not. A stage may
    be lost while others wait for it in the middle of a pass."""
    more: dict[str, Any] = {"train": {"steps": 8}, "save": {"every": 2}}
    apart = {**parts, "weights": weights, "heartbeat_timeout": 3.0, "max_failures_per_hour": -1}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more, runtime=apart)))
    more |= {"runtime": apart, "rollout": {"workers": 2}}
    killer = Killer(
        [Kill("rollout", "publish", 1), Kill("rank", phase, 3, which=1), Kill("rollout", "publish", 5, which=1)]
    )
    with killer.at_work():
        disturbed = run(load_settings(make_recipe("grpo", tmp_path / "killed", **more)), hooks=[killer.hook])
    print("\n".join(kill.row() for kill in killer.kills))
    assert killer.survived
    assert same_weights(whole, disturbed)


SHORT = """
from dataclasses import dataclass

import torch
import torch.distributed as dist

from plaudit.algorithms import SFT, register_algorithm


@dataclass(frozen=True)
class Short(SFT):
    def losses(self):
        ((role, loss),) = super().losses().items()

        def measured(output, part):
            if torch.is_grad_enabled() and dist.get_rank() == 1 and len(part.tokens) > {most}:
                torch.empty(1 << 55, dtype=torch.uint8)  # no machine has room for this
            return loss(output, part)

        return {{role: measured}}


register_algorithm("short", Short)
"""


def test_a_sharded_rank_that_runs_out_of_memory_goes_back_with_the_others(make_recipe: Recipe, tmp_path: Path) -> None:
    """They wait for it in the middle of a pass: all begin again, with passes of half the size, and nobody waits for a
    collective's time-out. Rows that never fit end the run with what stands."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "save": {"every": 2}, "learn": {"micro_tokens": 256}}
    alone = run(load_settings(make_recipe("sft", tmp_path / "alone", **more)))
    (tmp_path / "short.py").write_text(SHORT.format(most=70))
    recipe = make_recipe("sft", tmp_path / "ray", **more, runtime=RAY, plugins=[str(tmp_path / "short.py")])
    started = time.monotonic()
    pair = run(load_settings(recipe | {"method": "short"}))
    assert time.monotonic() - started < 100, "runtime.collective_timeout is 120"
    assert furthest(alone, pair) < 1e-6
    log = (pair.folder / "log.txt").read_text()
    assert "rank 1 ran out of memory with the policy (" in log
    assert "continuing from the start with learn.micro_tokens=128" in log
    (tmp_path / "short.py").write_text(SHORT.format(most=1))
    with pytest.raises(RankOutOfMemory, match=r"rank 1 .*memory with the policy.*no whole checkpoint"):
        run(load_settings(recipe | {"method": "short", "name": "never"}))
