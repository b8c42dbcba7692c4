"""Runs whose ranks have mirrors: a lost rank, a lost mirror, both at once, and the node of a rank."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD, Killer, alive, descendants
from kills import same_weights

from plaudit import Run, load_settings, run
from plaudit.loop.progress import Moment
from plaudit.types import Stats

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "heartbeat_timeout": 10.0, "max_failures_per_hour": 2}


class Losses(Killer):
    """At the first call of a method after so many steps, kills the first process of each of these names; "node of X"
    with all of its node."""

    def __init__(self, *planned: tuple[int, str, tuple[str, ...]], cluster: Any = None):
        super().__init__([], cluster=cluster)
        self.planned, self.done = [*planned], [0]
        """`done`: the steps that the run made, again too."""

    def sent(self, part: str | None, method: str) -> None:
        if self.planned and self.done[-1] >= self.planned[0][0] and method == self.planned[0][1]:
            for pid in [pid for name in self.planned.pop(0)[2] for pid in self.processes(name)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self, name: str) -> Iterable[int]:
        how, _, begin = name.rpartition(" of ")
        named = [one for one in self.workers if one.name.startswith(begin) and alive(one)]
        if how != "node":
            return [named[0].pid]
        node = next(node for node in self.cluster.worker_nodes if node.node_id == named[0].node)
        raylet = node.all_processes["raylet"][0].process.pid
        return {raylet, *descendants(raylet)}

    async def hook(self, moment: Moment) -> Stats:
        self.done.append(moment.progress.step)
        if self.cluster is not None and self.planned and self.planned[0][0] == self.done[-1] + 1:
            async with asyncio.timeout(60):  # a mirror that was lost is replaced in the background
                while len({one.node for one in self.workers if one.name.startswith("mirror") and alive(one)}) < 2:
                    await asyncio.sleep(0.05)
        return {}

    @property
    def again(self) -> list[int]:
        """Steps made again after each loss that cost any."""
        pairs = zip(self.done, self.done[1:], strict=False)
        return [before + 1 - step for before, step in pairs if step <= before]


def disturbed(losses: Losses, recipe: dict[str, Any]) -> tuple[Run, str, list[int]]:
    """Also its log, and the steps that ranks came back to by their mirrors."""
    with losses.at_work():
        done = run(load_settings(recipe), hooks=[losses.hook])
    assert not losses.planned
    assert [record["step"] for record in done.metrics] == list(range(1, len(done.metrics) + 1))
    said = (done.folder / "log.txt").read_text()
    return done, said, [int(step) for step in re.findall(r"the ranks' mirrors had step (\d+) of", said)]


def test_a_lost_rank_costs_at_most_a_step(make_recipe: Recipe, tmp_path: Path) -> None:
    """Parts of matrices of policy, critic and a reference that moves, of which there is no checkpoint."""
    more: dict[str, Any] = {"train": {"steps": 6}, "save": {"every": 100}, "reference": {"ema": 0.1}}
    more |= {"critic": {"learning_rate": 0.003}, "algorithm": {"normalise_values": True, "kl_target": 0.5}}
    ranks = {**RAY, "mesh": {"tensor": 2}}
    whole = run(load_settings(make_recipe("ppo", tmp_path / "whole", **more, runtime=ranks)))
    losses = Losses((3, "prepare", ("training rank 1",)), (4, "apply", ("training rank 0",)))
    mirrored = {**RAY, "mesh": {"tensor": 2, "mirrors": 1}}
    done, said, back = disturbed(losses, make_recipe("ppo", tmp_path / "killed", **more, runtime=mirrored))
    assert [step in (reached - 1, reached) for step, reached in zip(back, (3, 4), strict=True)] == [True, True]
    assert losses.again in ([], [1], [1, 1])
    assert "continuing from the ranks' mirrors, or else the start" in said
    for role in ("policy", "critic", "reference"):
        assert same_weights(whole, done, role=role)


def test_a_lost_node_costs_a_step_and_both_copies_those_since_the_checkpoint(
    make_recipe: Recipe, tmp_path: Path
) -> None:
    """Two ranks with shards, on nodes of one processor each: the copy of each one's state is on the other's node."""
    from ray.cluster_utils import Cluster

    more: dict[str, Any] = {"train": {"steps": 12}, "save": {"every": 6}}
    ranks = {**RAY, "num_training_workers": 2, "strategy": "fsdp"}
    whole = run(load_settings(make_recipe("sft", tmp_path / "whole", **more, runtime=ranks)))
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(5):
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20, include_log_monitor=False)
        losses = Losses(
            (3, "prepare", ("node of training rank 1",)),
            (6, "prepare", ("mirror",)),
            (10, "prepare", ("node of training rank 0", "node of training rank 1")),
            cluster=cluster,
        )
        runtime = {**ranks, "mesh": {"mirrors": 1}, "address": cluster.address}
        done, said, back = disturbed(losses, make_recipe("sft", tmp_path / "killed", **more, runtime=runtime))
    finally:
        cluster.shutdown()
    assert back in ([2], [3])
    assert len(re.findall(r"lost mirror \d: .*steps are mirrored again once another one has started", said)) >= 2
    assert "the mirrors of step" in said
    assert "resumed epoch" in said
    assert losses.again in ([4], [1, 4]), "the mirror that was lost by itself cost nothing"
    assert same_weights(whole, done)
