"""Where ranks and judges are placed, on real raylets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD
from kills import same_weights

from plaudit import Run, load_settings, run

Recipe = Callable[..., dict[str, Any]]
NODE = {"object_store_memory": 100 << 20, "include_log_monitor": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_cpus": 3})
    cluster.add_node(num_cpus=3, **NODE)
    yield cluster
    cluster.shutdown()


def trained(recipe: dict[str, Any]) -> tuple[Run, str]:
    done = run(load_settings(recipe))
    return done, (done.folder / "log.txt").read_text()


def test_ranks_of_one_row_share_a_node(cluster: Any, make_recipe: Recipe, tmp_path: Path) -> None:
    """Of two nodes of 3 CPUs each holds one of two tensor groups: without bundles of two, Ray takes 3 + 1."""
    mesh: dict[str, Any] = {"kind": "ray", "num_training_workers": 2, "mesh": {"tensor": 2}}
    mesh |= {"resources_per_worker": {"CPU": 1}}
    recipe = make_recipe("sft", tmp_path / "two", runtime=mesh | {"address": cluster.address})
    done, said = trained(recipe)
    ((one, other),) = re.findall(r"training ranks 0-1 on node (\w+), 2-3 on node (\w+)", said)
    assert one != other
    assert "waits for the network" not in said
    here, _ = trained(make_recipe("sft", tmp_path / "here", runtime=mesh | {"resources_per_worker": {"CPU": 0.5}}))
    assert same_weights(here, done)


def test_what_no_node_can_hold_is_said(cluster: Any, make_recipe: Recipe, tmp_path: Path) -> None:
    mesh: dict[str, Any] = {"kind": "ray", "num_training_workers": 1, "mesh": {"tensor": 2}}
    mesh |= {"resources_per_worker": {"CPU": 2}, "address": cluster.address}
    _, said = trained(make_recipe("sft", tmp_path, runtime=mesh))
    assert "1 of 1 groups of 2 training ranks that compute each row together" in said
    assert "A group needs 4 CPU on one node" in said


def test_a_group_is_divided_when_the_only_node_for_it_is_lost(make_recipe: Recipe, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    large = cluster.add_node(num_cpus=2, **NODE)

    async def lose(moment: Any) -> dict[str, float]:
        if moment.progress.step == 2 and large in cluster.list_all_nodes():
            for _ in range(2):
                cluster.add_node(num_cpus=1, **NODE)
            cluster.remove_node(large, allow_graceful=False)
            await asyncio.sleep(60)  # until the loss is found, which ends this
        return {}

    mesh: dict[str, Any] = {"kind": "ray", "num_training_workers": 1, "mesh": {"tensor": 2}, "heartbeat_timeout": 3}
    mesh |= {"resources_per_worker": {"CPU": 1}, "address": cluster.address, "start_timeout": 120}
    more: dict[str, Any] = {"train": {"steps": 4}, "save": {"every": 2}}
    try:
        done = run(load_settings(make_recipe("sft", tmp_path / "lost", runtime=mesh, **more)), hooks=[lose])
    finally:
        cluster.shutdown()
    said = (done.folder / "log.txt").read_text()
    assert "training ranks 0 on node" in said.partition("1 of 1 groups of 2 training ranks")[0]
    assert done.metrics[-1]["step"] == 4


def test_rollout_workers_and_judges_are_where_it_is_said(make_recipe: Recipe, judge: Path, tmp_path: Path) -> None:
    """A rollout worker of two processes loses its node, the only one that holds both; a judge never fits on one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    large = cluster.add_node(num_cpus=2, **NODE)
    for more in ({"apart": 1, "rank": 1}, {"apart": 1}):
        cluster.add_node(num_cpus=1, resources=more, **NODE)

    async def lose(moment: Any) -> dict[str, float]:
        if moment.progress.step == 1 and large in cluster.list_all_nodes():
            for _ in range(2):
                cluster.add_node(num_cpus=1, **NODE)
            cluster.remove_node(large, allow_graceful=False)
        return {}

    runtime: dict[str, Any] = {"address": cluster.address, "heartbeat_timeout": 3, "start_timeout": 120}
    runtime |= {"kind": "ray", "mesh": {"rollout_tensor": 2}, "resources_per_worker": {"CPU": 0.1, "rank": 1}}
    runtime |= {"resources_per_rollout_worker": {"CPU": 1}, "max_failures_per_hour": -1}
    asked = {"kind": "judge", "path": str(judge), "workers": 1, "tensor": 2, "resources": {"CPU": 0.1, "apart": 1}}
    recipe = make_recipe("grpo", tmp_path, runtime=runtime, rewards=[asked], train={"steps": 4})
    try:
        done = run(load_settings(recipe), hooks=[lose])
    finally:
        cluster.shutdown()
    assert done.metrics[-1]["step"] == 4
    said = (done.folder / "log.txt").read_text()
    assert re.search(r"rewards\.0 judges 0 on nodes \w{8} and \w{8}\n", said)
    (warning,) = re.findall(r".*groups of 2 processes of rewards\.0 judges.*", said)
    assert "rewards.0.tensor" in warning
    assert "A group needs 0.2 CPU, 2 apart on one node: reserve less (rewards.0.resources)" in warning
    begun, lost, after = said.partition("lost rollout worker 0")
    assert lost
    assert "processes of rollout workers" not in begun
    assert re.search(r"rollout workers 0 on nodes \w{8} and \w{8}\n", after)
    (warning,) = re.findall(r".*1 of 1 groups of 2 processes of rollout workers.*", after)
    assert "A group needs 2 CPU on one node: reserve less (runtime.resources_per_rollout_worker)" in warning


def test_a_judge_is_where_a_gpu_is(cluster: Any, make_recipe: Recipe, judge: Path, tmp_path: Path) -> None:
    """A node that says that it has one: torch finds none anywhere here, so everything computes on CPUs."""
    with_gpu = cluster.add_node(num_cpus=1, num_gpus=1, **NODE)
    asked: dict[str, Any] = {"rewards": [{"kind": "judge", "path": str(judge)}], "train": {"steps": 2}}
    try:
        runtime = {"kind": "ray", "address": cluster.address}
        done, said = trained(make_recipe("grpo", tmp_path / "two", runtime=runtime, **asked))
    finally:
        cluster.remove_node(with_gpu)
    assert f"the judge {judge} gets a process on a node with a GPU: this one has none" in said
    here, said = trained(make_recipe("grpo", tmp_path / "here", runtime={"kind": "ray"}, **asked))
    assert "gets a process" not in said
    assert same_weights(here, done)
