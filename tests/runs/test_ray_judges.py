"""A judge on workers of its own, in real Ray processes, of which one is killed and one is frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")

from safetensors.torch import load_file

from plaudit import load_settings, run
from plaudit.loop.progress import Moment
from plaudit.runtime.ray_worker import RayWorker
from plaudit.types import Stats

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
LONGEST = 60.0
"""Seconds that anything here may take."""


class Attack:
    """At the third question its judge is killed while it is asked; the one that then takes its place may start only
    once the run has done a step without it. The first question to that one freezes the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[int] = []
        self.killed = self.frozen = 0
        self.went_on, self.replaced = asyncio.Event(), asyncio.Event()
        start, call = RayWorker.start, RayWorker.call

        async def started(worker: RayWorker, timeout: float) -> None:
            if self.killed and not self.frozen and worker.name.startswith("judge"):
                await asyncio.wait_for(self.went_on.wait(), LONGEST)
                await start(worker, timeout)
                self.replaced.set()
            else:
                await start(worker, timeout)

        async def called(worker: RayWorker[Any], method: Any, *arguments: Any) -> Any:
            answer = asyncio.ensure_future(call(worker, method, *arguments))
            if method.__name__ == "of_sequences":
                await asyncio.sleep(0)  # it is sent
                self.strike(worker.pid)
            return await answer

        monkeypatch.setattr(RayWorker, "start", started)
        monkeypatch.setattr(RayWorker, "call", called)

    def strike(self, pid: int) -> None:
        first = pid not in self.asked
        self.asked.append(pid)
        if len(self.asked) == 3:
            self.killed = pid
            os.kill(pid, signal.SIGKILL)
        elif self.replaced.is_set() and first:
            self.frozen = next(other for other in self.asked if other not in (pid, self.killed))
            os.kill(self.frozen, signal.SIGSTOP)

    async def hook(self, moment: Moment) -> Stats:
        if self.killed:
            self.went_on.set()
            await asyncio.wait_for(self.replaced.wait(), LONGEST)
        return {}


@pytest.mark.usefixtures("kernels")
def test_judges_elsewhere_say_the_same_and_the_others_answer_for_one_that_is_lost(
    judge: Path, make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(name: str, more: dict[str, Any], **reward: Any) -> dict[str, Any]:
        rewards = [{"kind": "judge", "path": str(judge)} | reward]
        return make_recipe("grpo", tmp_path / name, **more) | {"rewards": rewards}

    here = run(load_settings(recipe("here", {})))
    attack = Attack(monkeypatch)
    runtime = {"kind": "ray", "max_failures_per_hour": 2, "heartbeat_timeout": 4.0}
    there = run(load_settings(recipe("there", {"runtime": runtime}, workers=2)), hooks=[attack.hook])
    assert attack.replaced.is_set(), "after the run had gone on with one"
    assert attack.frozen, "by the first question to the replacement"
    assert (there.folder / "log.txt").read_text().count("its questions are asked again") == 2
    assert [row["reward/judge"] for row in here.metrics] == [row["reward/judge"] for row in there.metrics]
    first, second = (load_file(found.model / "model.safetensors") for found in (here, there))
    assert all(first[name].equal(second[name]) for name in first)
