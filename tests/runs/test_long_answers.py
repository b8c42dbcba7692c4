"""Runs whose answers stay with the workers that sampled them: ranks and judges fetch them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD, HEADER, NODE, Kill, Killer
from kills import Task, same_weights, survive
from rounds import named

from plaudit import load_settings, run
from plaudit.tasks.demo import DemoFiles
from plaudit.types import Group

pytestmark = pytest.mark.slow
REWARDS = Path(__file__).parents[1] / "tiny.py"
TINY_OBJECTS = {"max_direct_call_object_size": 1}
"""Ray gives the driver no answer that is in its store on another node, however short it is."""
RAY = {"kind": "ray", "heartbeat_timeout": 10.0}
Recipe = Callable[..., dict[str, Any]]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All answers are long. How many sources the driver fetched, a number each time."""
    from plaudit.runtime.ray_worker import Stayed

    monkeypatch.setattr("plaudit.executors.generation.LARGE", 1)
    found: list[int] = []
    fetch = Stayed.all

    def counted(self: Stayed, left: Any) -> list[Any]:
        found.append(len(left))
        return fetch(self, left)

    monkeypatch.setattr(Stayed, "all", counted)
    return found


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_they_learn_what_a_local_run_learns(
    method: str, make_recipe: Recipe, tmp_path: Path, fetched: list[int]
) -> None:
    """GRPO does not read log-probs in the driver; PPO subtracts them from the reference's, whose ranks give them."""
    found = {}
    for kind, more in (("local", {}), ("ray", {"runtime": RAY, "rollout": {"workers": 2}})):
        recipe = make_recipe(method, tmp_path / kind, **more)
        found[kind] = run(load_settings(recipe | {"rewards": [{"kind": "function", "function": f"{REWARDS}:of_text"}]}))
    assert found["local"].samples == found["ray"].samples
    assert same_weights(found["local"], found["ray"])
    steps, recorded = len(found["ray"].metrics), {(one["step"], one["group"]) for one in found["ray"].samples}
    assert len(fetched) == steps + len(recorded), "a step's recorded rows at once, and each recorded group"


def test_judges_read_them_in_their_processes(
    make_recipe: Recipe, judge: Path, tmp_path: Path, fetched: list[int]
) -> None:
    """A judge in a process of its own fetches them there; a function's process gets texts alone."""
    by_text, judged = {"kind": "function", "function": f"{REWARDS}:of_text"}, {"kind": "judge", "path": str(judge)}
    found = {}
    for kind, workers, more in (("local", 0, {}), ("ray", 1, {"runtime": RAY, "rollout": {"workers": 1}})):
        rewards = [one | ({"workers": workers} if workers else {}) for one in (by_text, judged)]
        found[kind] = run(load_settings(make_recipe("grpo", tmp_path / kind, **more) | {"rewards": rewards}))
    assert same_weights(found["local"], found["ray"]) and fetched


def test_two_ranks_learn_the_same_from_them(
    make_recipe: Recipe, tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one prompt go to both ranks, in mini-batches, twice; the critic reads them too."""
    runtime, passes = RAY | {"mesh": {"data": 2}, "backend": "gloo"}, {"minibatches": 2, "epochs": 2}
    found = []
    for least in (1, 1 << 30):
        monkeypatch.setattr("plaudit.executors.generation.LARGE", least)
        recipe = make_recipe("ppo", tmp_path / f"{least}", runtime=runtime, algorithm=passes, rollout={"workers": 1})
        found.append(run(load_settings(recipe | {"rewards": [{"kind": "function", "function": f"{REWARDS}:of_text"}]})))
    assert same_weights(*found)
    assert found[0].samples == found[1].samples and fetched


def test_a_node_is_lost_with_answers_that_are_not_scored_yet(
    judge: Path, demo: DemoFiles, tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge on another node cannot fetch them: they are drawn again, and no step is done twice."""
    monkeypatch.setitem(HEAD, "_system_config", TINY_OBJECTS)
    kills = named("ppo", [Kill("node", "reward", step=1, which=1)])
    survive(kills, Task(demo, tmp_path, judge=judge))
    assert kills[0].survived and kills[0].fine, "\n".join([HEADER, kills[0].row()])
    assert kills[0].repeated == 0


@pytest.mark.parametrize("when", ["before ranks hold them", "while they learn", "while ranks of two nodes learn"])
def test_a_node_is_lost_with_scored_answers(
    when: str, make_recipe: Recipe, tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn again, unless ranks hold them: then ranks of another node get them from these. No step is done
    twice."""
    from ray.cluster_utils import Cluster

    from plaudit.executors.ray import RayExecutor

    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"_system_config": TINY_OBJECTS})
    killer, pinned, calls = Killer([], cluster=cluster), RayExecutor.pinned, list[int]()
    late, several = "learn" in when, "two" in when

    async def losing(executor: RayExecutor, groups: Sequence[Group]) -> Sequence[int]:
        calls.append(len(groups))
        found = await pinned(executor, groups) if late else ()
        if len(calls) == 2:
            of_ranks = {rank.node for rank in executor.ranks.workers}
            assert len(of_ranks) == 1 + several
            killer.end_node(next(one.node for one in executor.runtime.workers if one.node not in of_ranks))
        return found if late else await pinned(executor, groups)

    monkeypatch.setattr(RayExecutor, "pinned", losing)
    each = {"resources_per_worker": {"CPU": 1}, "resources_per_rollout_worker": {"CPU": 1}}
    spread = {"mesh": {"data": 2}, "backend": "gloo"} if several else {}
    runtime = RAY | spread
    more = {"algorithm": {"minibatches": 2}, "train": {"steps": 4}}
    workers = {"rollout": {"workers": 1 if several else 3}}
    found = []
    try:
        for _ in range(2 + several):
            cluster.add_node(**NODE | {"num_cpus": 1 if several else 2})
        for folder, own in (
            ("lost", {"runtime": runtime | each | {"address": cluster.address}, **workers}),
            ("whole", {"runtime": runtime, **workers} if several else {}),
        ):
            recipe = make_recipe("ppo", tmp_path / folder, **more, **own)
            recipe["rewards"] = [{"kind": "function", "function": f"{REWARDS}:of_text"}]
            found.append(run(load_settings(recipe)))
    finally:
        cluster.shutdown()
    told = (found[0].folder / "log.txt").read_text()
    assert "lost rollout worker" in told and "continuing from" not in told
    assert ("drawn again" in told) is not late
    assert same_weights(*found) and fetched
    lost, whole = ([one["reward/mean"] for one in done.metrics] for done in found)
    assert lost == whole


def test_where_the_driver_reads_each_token_answers_pass_it(
    make_recipe: Recipe, tmp_path: Path, fetched: list[int]
) -> None:
    local = run(load_settings(make_recipe("grpo", tmp_path / "local")))
    ray = run(load_settings(make_recipe("grpo", tmp_path / "ray", runtime=RAY, rollout={"workers": 1})))
    assert same_weights(local, ray) and not fetched, "the reward of these runs asks for tokens"
