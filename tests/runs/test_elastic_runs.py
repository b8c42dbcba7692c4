"""Runs on nodes that come and go, real raylets of one cluster: rollout workers join with them, answer, and leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import eventually, until

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD, Killer, alive, descendants, running
from kills import alike
from listening import free_port

from plaudit import Run, load_settings, run
from plaudit.loop.progress import Moment
from plaudit.runtime.ray_worker import RayWorker
from plaudit.runtime.resources import ResourcesError
from plaudit.types import Stats

Recipe = Callable[..., dict[str, Any]]
NODE = {"object_store_memory": 100 << 20, "include_log_monitor": False}
ONE: dict[str, Any] = {"resources_per_worker": {"CPU": 1}, "resources_per_rollout_worker": {"CPU": 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with room for two processes."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "resources": {"learner": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=HEAD | head)
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

        async def called(worker: RayWorker[Any], method: Any, *arguments: Any) -> Any:
            answer = await call(worker, method, *arguments)
            answers[worker.name, worker.node] += method.__name__ == "generate"
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
        await eventually(lambda: self.on(node), "a worker on the new node")

    async def leaves(self, node: Any) -> None:
        await eventually(lambda: not self.on(node), "the end of those on a node")

    def demanded(self) -> list[dict[str, float]]:
        """What Ray's autoscaler is told to find room for."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        demand = get_cluster_status(self.cluster.address).resource_demands.placement_group_demand
        return [dict(bundle.bundle) for group in demand for bundle in group.bundles_by_count]


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

    def said() -> str:
        return (tmp_path / "run" / "run" / "log.txt").read_text()

    async def come_and_go(moment: Moment) -> Stats:
        step = moment.progress.step
        if step in (1, 5):
            await eventually(watch.demanded, "a demand")
            demands.append(watch.demanded())
            nodes.append(cluster.add_node(num_cpus=1, **NODE))
            await watch.fills(nodes[-1])
            await eventually(lambda: said().count("rollout worker 1 is ready") == len(nodes), "a ready worker")
        if step == 3:
            cluster.remove_node(nodes[0], allow_graceful=False)
            await watch.leaves(nodes[0])
        if step == 6:
            take_back(cluster, nodes[1])
        return {}

    runtime = {"kind": "ray", "max_failures_per_hour": 0, "address": cluster.address} | ONE
    recipe = make_recipe("grpo", tmp_path / "run", runtime=runtime, rollout={"workers": [1, 2]}, **more)
    with watch.at_work():
        done = run(load_settings(recipe), hooks=[come_and_go])
    assert demands == [[{"CPU": 1.0}]] * 2
    assert all(watch.answers["rollout worker 1", node.node_id] > 0 for node in nodes)
    assert log(done).count("rollout worker 1 is ready") == 2
    assert log(done).count("lost rollout worker 1: ") == 1
    assert log(done).count("rollout worker 1 leaves its node, which will end") == 1
    assert not nodes[1].any_processes_alive(), "nobody kept it from ending"
    assert alike(whole, done)
    cluster.remove_node(nodes[-1])


def test_a_rollout_worker_gives_its_room_to_a_rank_whose_node_is_lost(
    cluster: Any, make_recipe: Recipe, tmp_path: Path
) -> None:
    """On nodes of 2 CPUs and 1 a third of all is a CPU. The rank is alone on a node, which has more of what it asks
    for, and the head is full. A node that joins later takes the rollout worker in again."""
    more: dict[str, Any] = {"train": {"steps": 8}, "save": {"every": 1}}
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

    runtime: dict[str, Any] = {"kind": "ray", "max_failures_per_hour": 1, "address": cluster.address}
    runtime["resources_per_worker"] = {"learner": 1}
    recipe = make_recipe("grpo", tmp_path / "run", runtime=runtime, rollout={"workers": 2}, **more)
    with watch.at_work():
        done = run(load_settings(recipe), hooks=[lose])
    assert "rollout worker 1 gives way to the training workers" in log(done)
    assert watch.answers["rollout worker 1", nodes[-1].node_id] > 0
    assert alike(whole, done)
    cluster.remove_node(nodes[-1])


NEIGHBOUR = """
import asyncio, sys
from plaudit.runtime.ray import RayRuntime
from plaudit.runtime.settings import RuntimeSettings
runtime = RayRuntime(RuntimeSettings(kind="ray", address=sys.argv[1]))
runtime.start()
assert asyncio.run(runtime.placed(runtime.reserve([{"CPU": 2.0}]), within=60.0))
print("has all of it", flush=True)
sys.stdin.read()
"""


def test_a_run_whose_room_others_have_ends_in_time(
    cluster: Any, make_recipe: Recipe, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Not at once, as what never fits: the others may end. It tells what it waited for, and leaves no demand."""
    command = [sys.executable, "-c", NEIGHBOUR, cluster.address]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runtime = {"kind": "ray", "address": cluster.address, "start_timeout": 2.0} | ONE
    with subprocess.Popen(command, env=environment, **pipes) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "has all of it\n"
        with pytest.raises(ResourcesError, match=r": 1 CPU .* 2 s .runtime\.start_timeout"):
            run(load_settings(make_recipe("grpo", tmp_path, runtime=runtime)))
        until(lambda: not Watch(cluster).demanded(), "the end of its demand")


def autoscaling(folder: Path, port: int, *, head: int, worker: int) -> dict[str, Any]:
    """Of Ray's autoscaler: nodes are raylets on this machine, at most one, and idle for a few seconds. `head` and
    `worker`: their CPUs."""
    node = {"resources": {"CPU": worker, "object_store_memory": 100 << 20}, "node_config": {}, "max_workers": 1}
    provider = {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "gcs_address": f"127.0.0.1:{port}",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
    more = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": folder.name,
        "max_workers": 1,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "provider": provider,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": head}, "node_config": {}, "max_workers": 0},
            "worker": node | {"min_workers": 0},
        },
        **{name: [] for name in (*lists, *more)},
    }


@contextmanager
def autoscaled(folder: Path, *, head: int = 2, worker: int = 1) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A head with this room for processes and Ray's own autoscaler: its address, and what was started."""
    port = free_port()
    config = folder / "autoscaler.yaml"
    config.write_text(yaml.safe_dump(autoscaling(folder, port, head=head, worker=worker)))
    environment = os.environ | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_TMPDIR": "/tmp"}
    environment.pop("RAY_ADDRESS", None)
    start = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--include-dashboard", "false"]
    start += ["--port", str(port), "--node-ip-address", "127.0.0.1", f"--autoscaling-config={config}"]
    start += ["--num-cpus", str(head), "--object-store-memory", str(NODE["object_store_memory"])]
    log = folder / "head.log"
    with log.open("wb") as out:
        process = subprocess.Popen(start, env=environment, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", process
    finally:
        left = descendants(process.pid) | {process.pid}
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid in running(left):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_nodes_that_are_not_there_yet_are_asked_for_and_waited_for(make_recipe: Recipe, tmp_path: Path) -> None:
    """From a head with no room: Ray's autoscaler brings a node for both workers. What it never brings is given up."""
    more: dict[str, Any] = {"train": {"steps": 2}}
    with autoscaled(tmp_path, head=0, worker=2) as (address, _):
        half = {"resources_per_worker": {"CPU": 1}, "address": address, "kind": "ray"}
        with pytest.raises(ResourcesError, match=r"ask for 1\.01 CPU in all"):
            run(load_settings(make_recipe("grpo", tmp_path / "refused", runtime=half, **more)))
        done = run(load_settings(make_recipe("grpo", tmp_path / "run", runtime=half | {"nodes_timeout": 120}, **more)))
        large = half | {"resources_per_worker": {"CPU": 3}, "nodes_timeout": 5}  # last: a node comes for its 1 CPU
        with pytest.raises(ResourcesError, match=r"4 CPU in all.* 5 s .runtime\.nodes_timeout"):
            run(load_settings(make_recipe("grpo", tmp_path / "large", runtime=large, **more)))
    said = (done.folder / "log.txt").read_text()
    assert "waiting for nodes, at most 120 s" in said
    assert said.index("waiting for nodes") < said.index("the nodes are there") < said.index("workers are ready")
    assert alike(run(load_settings(make_recipe("grpo", tmp_path / "whole", **more))), done)


def test_rays_autoscaler_adds_a_node_for_a_further_worker_and_takes_it_back(
    make_recipe: Recipe, tmp_path: Path
) -> None:
    """The real one, with real raylets: nobody but it adds the node."""
    more: dict[str, Any] = {"train": {"steps": 6}}
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **more)))
    with autoscaled(tmp_path) as (address, head):
        watch = Watch(None)

        def nodes() -> int:
            found = [Path(f"/proc/{pid}/comm") for pid in running(descendants(head.pid))]
            with suppress(FileNotFoundError):  # it ended just now
                return sum(path.read_text() == "raylet\n" for path in found)
            return nodes()

        async def joins(moment: Moment) -> Stats:
            if moment.progress.step == 1:
                await eventually(lambda: len({worker.node for worker in watch.workers if alive(worker)}) == 2, "a node")
                assert nodes() == 2
            return {}

        assert nodes() == 1
        runtime = {"kind": "ray", "max_failures_per_hour": 0, "address": address} | ONE
        rollout = {"workers": [1, 2]}
        recipe = make_recipe("grpo", tmp_path / "run", runtime=runtime, rollout=rollout, **more)
        with watch.at_work():
            done = run(load_settings(recipe), hooks=[joins])
        assert any(name == "rollout worker 1" for name, _ in watch.answers)
        assert alike(whole, done)
        until(lambda: nodes() == 1, "the end of the node that is idle now")
