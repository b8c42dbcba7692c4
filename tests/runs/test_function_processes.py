"""Reward functions run in real Ray processes. The run stays the same if one is killed, and mistakes are reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from kills import same_weights

from plaudit import load_settings, run
from plaudit.runtime.ray_worker import RayWorker

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
FUNCTION = """
import os

RUN = {run}

def reward(prompt, tokens):
    if len(tokens) % 4 == 1:
        return None
    if tokens[0] % 3 == 1:
        raise LookupError(f"no {{tokens[0]}}")
    return {{"reward": sum(tokens) % 11 / 5 - 1, "apart": float(os.getpid() != RUN)}}
"""


@pytest.mark.usefixtures("kernels")
def test_a_run_is_the_same_while_its_function_is_killed_elsewhere(
    make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FUNCTION.format(run=os.getpid()))

    def recipe(name: str, more: dict[str, Any], **reward: Any) -> dict[str, Any]:
        rewards = [{"kind": "function", "function": f"{file}:reward", "name": "mine"} | reward]
        rollout = {"rollout": {"max_failed": 1.0}}
        return make_recipe("grpo", tmp_path / name, **rollout, **more) | {"rewards": rewards}

    here = run(load_settings(recipe("here", {})))
    call, asked, killed = RayWorker.call, list[int](), list[int]()

    async def called(worker: RayWorker[Any], method: Any, *arguments: Any) -> Any:
        if method.__name__ == "scores":
            asked.append(worker.pid)
            if len(asked) == 4:
                file.write_text("def reward(tokens): return 0.0")  # what replaces it begins with the same file
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
        return await call(worker, method, *arguments)

    monkeypatch.setattr(RayWorker, "call", called)
    there = run(load_settings(recipe("there", {"runtime": {"kind": "ray"}}, workers=2)))
    assert "its answers are asked again" in (there.folder / "log.txt").read_text()
    assert len({*asked} - {*killed}) >= 1
    assert same_weights(here, there)
    for name in ("reward/mean", "reward/failed", "reward/not_applicable", "reward/mine"):
        assert [row.get(name) for row in here.metrics] == [row.get(name) for row in there.metrics]
    assert {row["reward/mine/apart"] for row in there.metrics} == {1.0}
    assert {row["reward/mine/apart"] for row in here.metrics} == {0.0}
    reasons = {str(answer["reason"]) for answer in there.samples if answer.get("reason")}
    assert any("LookupError: no" in reason and "(mine.py, line 10)" in reason for reason in reasons)


def test_a_function_that_other_processes_cannot_load_ends_the_run_before_it_starts(
    make_recipe: Recipe, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}: import not_here\ndef reward(tokens): return 1.0\n")
    rewards = [{"kind": "function", "function": f"{file}:reward", "workers": 1}]
    recipe = make_recipe("grpo", tmp_path, runtime={"kind": "ray"}) | {"rewards": rewards}
    with pytest.raises((ImportError, ValueError), match="not_here"):
        run(load_settings(recipe))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_functions_with_room_of_their_own_may_be_on_any_node(make_recipe: Recipe, tmp_path: Path) -> None:
    rewards = [{"kind": "length", "options": {"target": 5}, "workers": 2, "resources": {"CPU": 0.25}}]
    more: dict[str, Any] = {"runtime": {"kind": "ray"}, "train": {"steps": 2}}
    found = run(load_settings(make_recipe("grpo", tmp_path, **more) | {"rewards": rewards}))
    assert len(found.metrics) == 2
    refused = make_recipe("grpo", tmp_path / "refused", **more) | {"rewards": [rewards[0] | {"resources": {"CPU": 99}}]}
    with pytest.raises(ValueError, match="processes of rewards"):
        run(load_settings(refused))
