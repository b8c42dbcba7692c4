"""Runs on nodes that come and go, real raylets of one cluster: rollout workers join with them, answer, and leave."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install assent[ray]", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from faults import Killer, alive
from kills import alike

from assent import Run, load_settings, run
from assent.loop.progress import Moment
from assent.runtime.ray_worker import RayWorker
from assent.types import Stats

Recipe = Callable[..., dict[str, Any]]
NODE = {"object_store_memory": 100 << 20}
ONE: dict[str, Any] = {"resources_per_worker": {"CPU": 1}, "resources_per_rollout_worker": {"CPU": 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for two processes."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "resources": {"learner": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head | NODE)
    yield cluster
    cluster.shutdown()


class Watch(Killer):
    """Kills nobody, and counts what each worker answered, by its name and node."""

    def __init__(self, cluster: Any):
        super().__init__([], cluster=cluster)
        self.answers: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        call, answers = RayWorker.call, self.answers

        async def called(worker: RayWorker, method: str, *arguments: Any) -> Any:
            answer = await call(worker, method, *arguments)
            answers[worker.name, worker.node] += method == "generate"
            return answer

        RayWorker.call = called  # type: ignore[method-assign]
        try:
            with super().at_work():
                yield
        finally:
            RayWorker.call = call  # type: ignore[method-assign]

    def on(self, node: Any) -> list[RayWorker]:
        return [worker for worker in self.workers if alive(worker) and worker.node == node.node_id]

    async def fills(self, node: Any) -> None:
        await until(lambda: self.on(node), "a worker on the new node")

    async def leaves(self, node: Any) -> None:
        await until(lambda: not self.on(node), "the end of those on a node")

    def demanded(self) -> list[dict[str, float]]:
        """What Ray's autoscaler is told to find room for."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        demand = get_cluster_status(self.cluster.address).resource_demands.placement_group_demand
        return [dict(bundle.bundle) for group in demand for bundle in group.bundles_by_count]


async def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: in vain for {seconds:g} s"
        await asyncio.sleep(0.05)


def take_back(cluster: Any, node: Any) -> None:
    """As an autoscaler does: the node is to end once nobody uses it."""
    from ray._raylet import GcsClient

    preempted, in_a_minute = 2, int(time.time() + 60) * 1000
    accepted, why = GcsClient(cluster.address).drain_node(node.node_id, preempted, "taken back", in_a_minute)
    assert accepted, why


def log(done: Run) -> str:
    return (done.folder / "log.txt").read_text()


def test_further_workers_join_with_their_nodes_and_go_with_them(
    cluster: Any, make_recipe: Recipe, tmp_path: Path
) -> None:
    """Not one failure is allowed: a further worker that goes is none. Its node is killed, and another one taken back,
    which the worker leaves by itself."""
    more: dict[str, Any] = {"train": {"steps": 8}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    watch, nodes, demands = Watch(cluster), list[Any](), list[list[dict[str, float]]]()

    async def come_and_go(moment: Moment) -> Stats:
        step = moment.progress.step
        if step in (1, 5):
            await until(watch.demanded, "a demand")
            demands.append(watch.demanded())
            nodes.append(cluster.add_node(num_cpus=1, **NODE))
            await watch.fills(nodes[-1])
        if step == 3:
            cluster.remove_node(nodes[0], allow_graceful=False)
            await watch.leaves(nodes[0])
        if step == 6:
            take_back(cluster, nodes[1])
        return {}

    runtime = {"kind": "ray", "max_failures": 0, "address": cluster.address} | ONE
    recipe = make_recipe("grpo", tmp_path / "run", runtime=runtime, rollout={"workers": 1, "workers_max": 2}, **more)
    with watch.at_work():
        done = run(load_settings(recipe), hooks=[come_and_go])
    assert demands == [[{"CPU": 1.0}]] * 2
    assert all(watch.answers["rollout worker 1", node.node_id] > 0 for node in nodes)
    assert log(done).count("rollout worker 1 is ready") == 2
    assert log(done).count("lost rollout worker 1: its node is gone") == 1
    assert log(done).count("rollout worker 1 leaves its node, which is to end") == 1
    assert not nodes[1].any_processes_alive(), "nobody kept it from ending"
    assert alike(whole, done)
    cluster.remove_node(nodes[-1])


def test_a_rollout_worker_gives_its_room_to_a_rank_whose_node_is_lost(
    cluster: Any, make_recipe: Recipe, tmp_path: Path
) -> None:
    """On nodes of 2 CPUs and 1 a third of all is a CPU. The rank is alone on a node, which has more of what it asks
    for, and the head is full. A node that joins later takes the rollout worker in again."""
    more: dict[str, Any] = {"train": {"steps": 8}, "save": {"steps": 1}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    watch, nodes = Watch(cluster), [cluster.add_node(num_cpus=1, resources={"learner": 100}, **NODE)]

    async def lose(moment: Moment) -> Stats:
        if moment.progress.step == 2 and len(nodes) == 1:
            assert [worker.name for worker in watch.on(nodes[0])] == ["training rank 0"]
            cluster.remove_node(nodes[0], allow_graceful=False)
            nodes.append(None)
        if moment.progress.step == 5:
            nodes.append(cluster.add_node(num_cpus=1, **NODE))
            await watch.fills(nodes[-1])
        return {}

    runtime: dict[str, Any] = {"kind": "ray", "max_failures": 1, "address": cluster.address}
    runtime["resources_per_worker"] = {"learner": 1}
    recipe = make_recipe("grpo", tmp_path / "run", runtime=runtime, rollout={"workers": 2}, **more)
    with watch.at_work():
        done = run(load_settings(recipe), hooks=[lose])
    assert "rollout worker 1 gives way to the training workers" in log(done)
    assert watch.answers["rollout worker 1", nodes[-1].node_id] > 0
    assert alike(whole, done)
    cluster.remove_node(nodes[-1])
