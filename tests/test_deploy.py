"""The files of deploy/ on one machine: Slurm's commands are stubs around real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from listening import free_port
from waiting import until

from plaudit import Run

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ]; do shift; done
exec "$@"
"""
"""Starts here what Slurm would start on a node."""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$REQUEUED"; fi
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_a_job_of_slurm_saves_when_its_time_is_over_and_goes_on(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    programs, own = tmp_path / "bin", tempfile.mkdtemp(dir="/tmp", prefix="slurm")  # its sockets' names are short
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    recipe = tmp_path / "sft.yaml"
    more: dict[str, Any] = {"runtime": {"num_training_workers": 2, "kind": "ray", "resources_per_worker": {"CPU": 1}}}
    recipe.write_text(yaml.safe_dump(make_recipe("sft", tmp_path / "runs", **more)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_TMPDIR": own,
        "PLAUDIT_PORT": str(free_port()),
        "RAY_START": "--object-store-memory 104857600",
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_ON_NODE": "1",
        "REQUEUED": str(tmp_path / "requeued"),
    }
    folder = tmp_path / "runs" / "run"

    def steps() -> list[int]:
        return [one["step"] for one in Run(folder).metrics] if (folder / "metrics.jsonl").exists() else []

    def job(most: int) -> subprocess.Popen[bytes]:
        command = ["bash", str(DEPLOY / "slurm.sh"), "sft", str(recipe), f"train.steps={most}"]
        with (tmp_path / "job.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)

    def log() -> str:
        return (tmp_path / "job.log").read_text(errors="replace")

    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(job(10_000))
        until(lambda: len(steps()) > 1, "two steps")
        started[0].send_signal(signal.SIGTERM)
        assert started[0].wait(60) == 128 + signal.SIGTERM, log()
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        reached = len(steps())
        until(lambda: not raylets(own), "the end of its nodes", seconds=60)
        started.append(job(reached + 1))
        assert started[1].wait(180) == 0, log()
    finally:
        for one in started:
            one.kill()
        for pid in raylets(own):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert steps() == list(range(1, reached + 2)), "none was lost"
    said = (folder / "log.txt").read_text()
    assert "2 nodes: 2 CPU" in said and f"step {reached} of {reached + 1}" in said


def raylets(folder: str) -> list[int]:
    """Processes of Ray whose logs and sockets are in this folder."""
    found = subprocess.run(
        ["pgrep", "-f", f"(raylet|gcs_server).*{folder}"], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]
