"""Whole runs by parameter servers, with real Ray processes: what they learn, and what a loss of each kind does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")

from faults import Killer
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.loop.checkpoint import Store
from plaudit.loop.copies import Copies
from plaudit.loop.progress import Moment
from plaudit.servers.executor import ServerExecutor
from plaudit.types import Stats

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
RAY = {"kind": "ray", "strategy": "server", "num_training_workers": 2}


def furthest(a: Run, b: Run) -> float:
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


class Ends(Killer):
    """Kills the first worker of a name after a step, and waits after a later one until there are two islands again."""

    def __init__(self, name: str, after: int, wait: int = 0):
        super().__init__([])
        self.name, self.after, self.wait = name, after, wait
        self.seen: list[tuple[int, float]] = []
        self.executors: list[Any] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        form, executors = ServerExecutor._form, self.executors

        async def formed(executor: ServerExecutor) -> None:
            executors.append(executor)
            await form(executor)

        ServerExecutor._form = formed  # type: ignore[method-assign]
        try:
            with super().at_work():
                yield
        finally:
            ServerExecutor._form = form  # type: ignore[method-assign]

    def named(self) -> list[Any]:
        return [worker for worker in self.workers if worker.name.startswith(self.name) and worker.alive]

    async def hook(self, moment: Moment) -> Stats:
        step = moment.progress.step
        self.seen.append((step, moment.stats["servers/workers/policy"]))
        if step == self.after and self.seen.count((step, self.seen[-1][1])) == 1:
            os.kill(self.named()[0].pid, signal.SIGKILL)
        if step == self.wait:
            while len(self.executors[0].ranks.supervisor.workers) < 2:
                await asyncio.sleep(0.05)
        return {}


def test_ppo_goes_on_without_a_lost_island_and_with_its_successor(make_recipe: Recipe, tmp_path: Path) -> None:
    """Of two ranks, one of which is killed. Nothing is repeated, and weights are those of one process at each step."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "critic": {"learning_rate": 0.003}}
    more |= {"train": {"steps": 8}, "algorithm": {"minibatches": 1}}
    alone = run(load_settings(make_recipe("ppo", tmp_path / "alone", **more)))
    killer = Ends("training rank", 3, wait=5)
    runtime = RAY | {"servers": {"count": 2}, "mesh": {"data": 2}}
    with killer.at_work():
        done = run(load_settings(make_recipe("ppo", tmp_path / "ray", **more, runtime=runtime)), hooks=[killer.hook])
    assert [step for step, _ in killer.seen] == list(range(1, 9))
    assert dict(killer.seen)[4] == 1
    assert dict(killer.seen)[8] == 2
    assert [s["completion"] for s in alone.samples] == [s["completion"] for s in done.samples]
    assert furthest(alone, done) < 1e-6
    further = [
        run(
            load_settings({**make_recipe("ppo", tmp_path / name, **more | {"train": {"steps": 9}}), "resume": "latest"})
        )
        for name in ("alone", "ray")
    ]
    assert furthest(*further) < 1e-6, "any strategy goes on from the checkpoint"


class InSave(Ends):
    """Kills the first worker of a name when the `call`-th call of a method of a checkpoint is made from step 3 on."""

    def __init__(self, name: str, method: str, call: int):
        super().__init__(name, 0)
        self.method, self.calls = method, call

    def sent(self, part: str | None, method: str) -> None:
        if method == self.method and self.seen and self.seen[-1][0] >= 3 and self.calls:
            self.calls -= 1
            if not self.calls:
                os.kill(self.named()[0].pid, signal.SIGKILL)


@pytest.mark.parametrize(("name", "method", "call"), [("training rank", "save", n) for n in (1, 2, 3)])
def test_a_training_worker_that_dies_in_a_save_costs_nothing_else(
    name: str, method: str, call: int, make_recipe: Recipe, tmp_path: Path
) -> None:
    """Another island writes in its place: the run goes on, and one death is one failure."""
    more: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "train": {"steps": 6}, "save": {"every": 3}}
    alone = run(load_settings(make_recipe("sft", tmp_path / "alone", **more)))
    killer = InSave(name, method, call)
    runtime = RAY | {"servers": {"count": 2}, "max_failures_per_hour": 1}
    with killer.at_work():
        done = run(load_settings(make_recipe("sft", tmp_path / "ray", **more, runtime=runtime)), hooks=[killer.hook])
    assert killer.calls == 0, "it was killed"
    assert [step for step, _ in killer.seen] == list(range(1, 7)), "no step is repeated"
    assert furthest(alone, done) < 1e-6
    more["train"] = {"steps": 7}
    recipes = (make_recipe("sft", tmp_path / folder, **more) for folder in ("alone", "ray"))
    again = [run(load_settings({**recipe, "resume": "latest"})) for recipe in recipes]
    assert furthest(*again) < 1e-6, "what the others wrote is whole"


def test_a_training_worker_that_dies_while_it_copies_costs_nothing_else(
    make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another island copies what is committed to the address, and the driver copies nothing."""

    def publish(copies: Copies, folder: Path, role: str, name: str) -> None:
        raise AssertionError("the driver copies")

    monkeypatch.setattr(Copies, "publish", publish)
    there = f"file://{tmp_path}/there"
    more: dict[str, Any] = {"train": {"steps": 6}, "save": {"every": 3, "to": there}}
    killer = InSave("training rank", "publish", 1)
    runtime = RAY | {"servers": {"count": 2}, "max_failures_per_hour": 1}
    with killer.at_work():
        done = run(load_settings(make_recipe("sft", tmp_path / "ray", **more, runtime=runtime)), hooks=[killer.hook])
    assert killer.calls == 0, "it was killed"
    assert [step for step, _ in killer.seen] == list(range(1, 7)), "no step is repeated"
    fetched = Store(tmp_path / "fetched", Copies(f"{there}/run"))
    assert fetched.latest() == (done.saved[-1], [])
    assert fetched.known() == done.saved == [f"epoch1epochstep{step}globalstep{step}" for step in (3, 6)]


def test_a_server_that_dies_in_a_save_is_one_failure(make_recipe: Recipe, tmp_path: Path) -> None:
    more: dict[str, Any] = {"train": {"steps": 6}, "save": {"every": 3}}
    runtime = RAY | {"servers": {"count": 2}, "max_failures_per_hour": 1}
    whole = run(load_settings(make_recipe("sft", tmp_path / "whole", **more, runtime=runtime)))
    killer = InSave("parameter server", "state", 1)
    with killer.at_work():
        done = run(load_settings(make_recipe("sft", tmp_path / "killed", **more, runtime=runtime)), hooks=[killer.hook])
    assert killer.calls == 0 and furthest(whole, done) < 1e-6


def test_a_lost_server_takes_the_run_back_to_its_checkpoint(make_recipe: Recipe, tmp_path: Path) -> None:
    servers = {"local_steps": 2, "push": "int8"}
    more: dict[str, Any] = {"train": {"steps": 6}, "save": {"every": 3}, "runtime": RAY | {"servers": servers}}
    whole = run(load_settings(make_recipe("sft", tmp_path / "whole", **more)))
    killer = Ends("parameter server", 4)
    with killer.at_work():
        done = run(load_settings(make_recipe("sft", tmp_path / "killed", **more)), hooks=[killer.hook])
    assert [step for step, _ in killer.seen].count(4) == 2
    assert "parameter server 0" in (done.folder / "log.txt").read_text()
    assert furthest(whole, done) == 0.0, "in the middle of a round, to the bit"
