"""Runs whose answers stay with the workers that sampled them: ranks and judges fetch them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEADER, Kill
from kills import Task, same_weights, survive
from rounds import named

from plaudit import load_settings, run
from plaudit.tasks.demo import DemoFiles

pytestmark = pytest.mark.slow
REWARDS = Path(__file__).parents[1] / "tiny.py"
RAY = {"kind": "ray", "heartbeat_timeout": 10.0, "mesh": {"mirrors": 1}}
Recipe = Callable[..., dict[str, Any]]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All answers are long. How many sources the driver fetched, a number each time."""
    from plaudit.runtime.ray_worker import Stayed

    monkeypatch.setattr("plaudit.crew.ray.LARGE", 1)
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
    runtime, passes = RAY | {"mesh": {"data": 2, "mirrors": 1}, "backend": "gloo"}, {"minibatches": 2, "epochs": 2}
    found = []
    for least in (1, 1 << 30):
        monkeypatch.setattr("plaudit.crew.ray.LARGE", least)
        recipe = make_recipe("ppo", tmp_path / f"{least}", runtime=runtime, algorithm=passes, rollout={"workers": 1})
        found.append(run(load_settings(recipe | {"rewards": [{"kind": "function", "function": f"{REWARDS}:of_text"}]})))
    assert same_weights(*found)
    assert found[0].samples == found[1].samples and fetched


def test_a_node_with_answers_is_lost(
    judge: Path, demo: DemoFiles, tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are scored, and before ranks have fetched them: the run goes back, and ends as an undisturbed one."""
    monkeypatch.setattr("plaudit.crew.ray.stays", lambda settings: True)
    kills = named("ppo", [Kill("node", "reward", step=1, which=1), Kill("node", "update", step=3, which=2)])
    survive(kills, Task(demo, tmp_path, judge=judge))
    assert all(kill.survived and kill.fine for kill in kills), "\n".join([HEADER, *(kill.row() for kill in kills)])


def test_where_the_driver_reads_each_token_answers_pass_it(
    make_recipe: Recipe, tmp_path: Path, fetched: list[int]
) -> None:
    local = run(load_settings(make_recipe("grpo", tmp_path / "local")))
    ray = run(load_settings(make_recipe("grpo", tmp_path / "ray", runtime=RAY, rollout={"workers": 1})))
    assert same_weights(local, ray) and not fetched, "the reward of these runs asks for tokens"
