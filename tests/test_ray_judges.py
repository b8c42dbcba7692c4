"""A judge on workers of its own, in real Ray processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install assent[ray]")

from safetensors.torch import load_file

from assent import load_settings, run
from assent.runtime.ray import RayWorker

Recipe = Callable[..., dict[str, Any]]


def test_judges_elsewhere_say_the_same_and_one_that_is_killed_is_replaced(
    judge: Path, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(name: str, more: dict[str, Any], **reward: Any) -> dict[str, Any]:
        rewards = [{"kind": "judge", "path": str(judge)} | reward]
        return make_recipe("grpo", tmp_path / name, **more) | {"rewards": rewards}

    pids: list[int] = []
    call = RayWorker.call

    async def seen(worker: RayWorker, method: str, *arguments: Any) -> Any:
        """The third question ends its process while it is asked."""
        answer = call(worker, method, *arguments)
        if method == "of_sequences":
            pids.append(worker.pid)
            if len(pids) == 3:
                os.kill(worker.pid, signal.SIGKILL)
        return await answer

    monkeypatch.setattr(RayWorker, "call", seen)
    here = run(load_settings(recipe("here", {})))
    runtime = {"kind": "ray", "object_store_mb": 100, "max_failures": 1}
    there = run(load_settings(recipe("there", {"runtime": runtime}, workers=2)))
    assert len(set(pids)) == 3, "two judges, and the one that took the killed one's place"
    assert [row["reward/judge"] for row in here.metrics] == [row["reward/judge"] for row in there.metrics]
    first, second = (load_file(found.model / "model.safetensors") for found in (here, there))
    assert all(first[name].equal(second[name]) for name in first)
