"""A run on Ray is asked to stop in every phase of a step: it saves, ends at once, and goes on as if it had not been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from faults import HEAD, PHASES, Kill, Killer, descendants
from kills import Task, alike, lasting, steps

from plaudit import Run, load_settings, run
from plaudit.loop.checkpoint import Store
from plaudit.support.errors import Stopped
from plaudit.tasks.demo import DemoFiles

ALLOWED = 10.0
"""Seconds from the signal to the end."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_cpus": 3})
    yield cluster
    cluster.shutdown()


def test_sigterm_in_every_phase(cluster: Any, judge: Path, demo: DemoFiles, tmp_path: Path) -> None:
    """Each run goes on where the one before it was stopped, the last one in this process. An end takes in the step
    under way and that of the workers; nothing is done twice."""
    stops = [Kill("driver", phase, number, signal.SIGTERM) for number, phase in enumerate(PHASES)]
    task = Task(demo, tmp_path, judge=judge)
    runtime = {"kind": "ray", "address": cluster.address}
    done = Run(tmp_path / "stopped" / "run")
    for stop in stops:
        judges = int(stop.phase == "reward")  # they are slow to start, and the driver's own judge says the same
        recipe = task.recipe(stops, "stopped", workers=judges, runtime=runtime, save={"every": 1}, resume="latest")
        killer = Killer([stop], steps=steps(done))
        with killer.at_work(), pytest.raises(Stopped, match="SIGTERM after step") as e:
            run(load_settings(recipe), hooks=[killer.hook])
        assert stop.at is not None
        seconds = time.monotonic() - stop.at
        print(f"{stop.phase:8} after step {stop.reached}: ended after {seconds:.1f} s, step {committed(done)} saved")
        assert e.value.code == 128 + signal.SIGTERM
        assert seconds < ALLOWED
        assert stop.reached < committed(done) == steps(done)
    whole, rest = task.recipe(stops, "whole"), task.recipe(stops, "stopped", resume="latest")
    assert alike(run(load_settings(whole)), run(load_settings(rest)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_is_heard_behind_that(
    number: signal.Signals, make_recipe: Callable[..., dict[str, Any]], tmp_path: Path, environment: dict[str, str]
) -> None:
    """Ray's own handler would end the run with a traceback, and status 15."""
    (tmp_path / "recipe.json").write_text(json.dumps(make_recipe("grpo", tmp_path)))
    command = [sys.executable, "-m", "plaudit.commands.cli", "grpo", str(tmp_path / "recipe.json"), "runtime=ray"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        until = time.monotonic() + 60.0
        while "gcs_server" not in map(name_of, started := descendants(process.pid)):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 128 + number, said
    assert said == f"stopped by {number.name} before its workers were ready; resume=latest continues from there\n"
    assert not lasting(started)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def committed(done: Run) -> int:
    names = Store(done.folder / "checkpoints").names()
    return int(names[-1].rpartition("globalstep")[2]) if names else 0
