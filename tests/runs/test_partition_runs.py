"""A node is cut off from the network while a run is on it, and comes back later: real namespaces, links and raylets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from partition import Island, end, joined, missing

if reason := missing():
    pytest.skip(f"a network partition {reason}", allow_module_level=True)

from faults import HEAD, HEADER, LONGEST, Kill, Killer
from kills import FAULTS, Task, alike

from plaudit import Run, load_settings, run
from plaudit.loop.checkpoint import Store
from plaudit.tasks.demo import DemoFiles

Recipe = Callable[..., dict[str, Any]]
LONG = {"kind": "ray", "heartbeat_timeout": 20.0}
RULE = {"kind": "function", "function": f"{FAULTS}:varied"}
SHORT = {"prompts_per_step": 3, "max_tokens": 10, "slots": 8}
STEPS = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "resources": {"home": 1, "learner": 1, "judge": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=HEAD | head)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def islands(cluster: Any) -> Iterator[list[Island]]:
    """One, and behind it those that took its place: where it has more of something, workers go there first."""
    islands = [Island(cluster.address, 3, learner=1, judge=100)]
    try:
        joined(cluster, 2, islands[0])
        yield islands
    finally:
        end(islands)


@dataclass
class Setting:
    """Of both tests: a task, and a cluster of a head and an island."""

    task: Task
    cluster: Any
    islands: list[Island]

    def disturbed(self, kill: Kill, *, workers: int, runtime: dict[str, Any], **more: Any) -> Run:
        """A run whose island is cut off, with so many workers in all. It comes back while the run goes on."""
        killer = Killer([kill], cluster=self.cluster, expected=workers, islands=self.islands)
        runtime = LONG | {"address": self.cluster.address} | runtime
        recipe = self.task.recipe([kill], "cut", runtime=runtime, train={"steps": STEPS}, **more)
        with killer.at_work():
            done = run(load_settings(recipe), hooks=[killer.hook])
        print(HEADER, kill.row(), sep="\n")
        return done

    def check(self, kill: Kill, done: Run, **more: Any) -> None:
        """It ended as an undisturbed run, and what was cut off has ended."""
        assert kill.survived
        assert alike(run(load_settings(self.task.recipe([kill], "whole", train={"steps": STEPS}, **more))), done)
        assert self.islands[-2].empties(LONGEST)


@pytest.fixture
def setting(cluster: Any, islands: list[Island], judge: Path, demo: DemoFiles, tmp_path: Path) -> Setting:
    return Setting(Task(demo, tmp_path, judge=judge), cluster, islands)


def test_weights_travel_to_an_island_by_a_collective(
    cluster: Any, islands: list[Island], make_recipe: Recipe, tmp_path: Path
) -> None:
    """The rank is at home, and a rollout worker on each side: gloo's broadcast goes over the link."""
    runtime = {"resources_per_worker": {"CPU": 1, "home": 1}, "resources_per_rollout_worker": {"CPU": 2}}
    runtime |= LONG | {"address": cluster.address, "weights": "collective", "collective_timeout": 20.0}
    watch = Killer([], cluster=cluster)
    with watch.at_work():
        done = run(load_settings(make_recipe("grpo", tmp_path / "apart", runtime=runtime, rollout={"workers": 2})))
    there = watch.node_at(islands[-1].address)
    away = sorted((worker.name[:-2], worker.node == there) for worker in watch.workers)
    assert away == [("rollout worker", False), ("rollout worker", True), ("training rank", False)]
    assert alike(run(load_settings(make_recipe("grpo", tmp_path / "whole"))), done)


def test_a_rollout_worker_and_a_judge_are_cut_off(setting: Setting) -> None:
    """Their work moves to others, no step is done again, and what they say when they are back is not taken."""
    kill = Kill("partition", "rollout", 3)
    runtime = {"resources_per_worker": {"CPU": 1, "home": 1}, "resources_per_rollout_worker": {"CPU": 1}}
    judges = {"kind": "judge", "path": str(setting.task.judge), "workers": 1, "resources": {"CPU": 1, "judge": 1}}
    done = setting.disturbed(kill, workers=4, runtime=runtime, rewards=[RULE, judges], rollout={"workers": 2, **SHORT})
    said = (done.folder / "log.txt").read_text()
    assert re.search(r"lost rollout worker \d: its node is gone \(health check failed", said)
    assert "lost judge 0" in said
    assert kill.repeated == 0
    setting.check(kill, done)


def test_a_training_rank_is_cut_off(setting: Setting) -> None:
    """All ranks are formed again from a checkpoint while the lost one is still there; nothing is committed twice."""
    kill = Kill("partition", "update", 3)
    ranks = {"num_training_workers": 2, "resources_per_worker": {"CPU": 1, "learner": 1}}
    rollout = {"resources_per_rollout_worker": {"CPU": 1, "home": 1}}
    done = setting.disturbed(kill, workers=3, runtime=ranks | rollout, rewards=[RULE], rollout=SHORT)
    assert re.search(r"lost training rank \d: its node is gone", (done.folder / "log.txt").read_text())
    assert kill.repeated == 1
    store = Store(done.folder / "checkpoints")
    for name in store.names():
        store.verify(name)
    assert not list(store.folder.glob("*/.writing-*")), "nothing half written is left"
    assert [record["step"] for record in done.metrics] == list(range(1, STEPS + 1))
    setting.check(kill, done, runtime=LONG | {"num_training_workers": 2}, rewards=[RULE])
