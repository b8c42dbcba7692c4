"""The files of deploy/, as far as one machine can use them: Slurm's commands are stubs around real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
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
from plaudit.settings.recipes import read_settings

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
SQUEUE = "#!/usr/bin/env bash\necho $STATE\n"


NOT_SHOWN = {"length_max", "unfinished", "clip_fraction", "reward_failed", "groups_equal"}
NOT_SHOWN |= {"time_generate", "time_rewards", "time_learn"}
"""Figures of the board that are no curves of a run's page."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def containers(found: Any) -> list[dict[str, Any]]:
    """Every container of a document, with its pod's volumes."""
    if isinstance(found, list):
        return [one for part in found for one in containers(part)]
    if not isinstance(found, dict):
        return []
    own = [one | {"volumes": found.get("volumes", [])} for one in found.get("containers", ())]
    return own + [one for part in found.values() for one in containers(part)]


def test_pods_mount_what_they_have_and_commands_are_those_of_plaudit() -> None:
    (job,) = documents("rayjob.yaml")
    program, method, recipe, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, recipe) == ("plaudit", "/work/grpo.yaml")
    settings = read_settings(None, words, method=method)
    assert (settings.runtime.kind, settings.runtime.address, settings.resume) == ("ray", "auto", "latest")
    names = ("rayjob.yaml", "rayservice.yaml", "reward.yaml")
    found = [one for name in names for document in documents(name) for one in containers(document)]
    assert len(found) == 5
    for one in found:
        assert {mount["name"] for mount in one["volumeMounts"]} <= {volume["name"] for volume in one["volumes"]}
        assert one["image"] == "plaudit:latest" and "memory" in one["resources"]["limits"]


def test_the_image_copies_and_installs_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied and all((ROOT / word).exists() for word in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (asked,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert {*asked.split(",")} <= {*extras}
    (torch,) = re.findall(r'^ARG TORCH="(.*)"$', text, re.MULTILINE)
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(torch)}\b", pinned, re.MULTILINE), "as the tests have it"


def test_the_board_shows_figures_of_runs() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = [one["expr"] for panel in board["panels"] for one in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"ray_plaudit_(\w+)", text)}
    assert len(names) == len(asked)
    known = yaml.safe_load((ROOT / "src/plaudit/monitor/figures.yaml").read_text(encoding="utf-8"))
    assert names - {re.sub(r"\W", "_", name) for name in known} == NOT_SHOWN


def written(folder: Path, **programs: str) -> None:
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("state", "again"), [("RUNNING", ["requeue 7"]), ("COMPLETING", [])])
def test_a_job_that_is_cancelled_does_not_come_back(state: str, again: list[str], tmp_path: Path) -> None:
    """States that Slurm 22.05 tells when its time is nearly over, and when `scancel` ends it. There is no Ray here."""
    quiet = "#!/usr/bin/env bash\n"
    run = f"{quiet}trap 'exit 143' TERM; touch running; while true; do sleep 0.05; done\n"
    own = {"srun": quiet, "python": f"{quiet}cat > /dev/null\n", "plaudit": run}
    written(tmp_path / "bin", scontrol=SCONTROL, squeue=SQUEUE, **own)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "REQUEUED": str(tmp_path / "requeued")}
    environment |= {"SLURM_JOB_NODELIST": "two", "SLURM_JOB_ID": "7", "STATE": state}
    job = subprocess.Popen(["bash", str(DEPLOY / "slurm.sh"), "sft"], env=environment, cwd=tmp_path)
    until(lambda: (tmp_path / "running").exists(), "the run")
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert ((tmp_path / "requeued").read_text().splitlines() if again else [*tmp_path.glob("requeued")]) == again


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_a_job_of_slurm_saves_when_its_time_is_over_and_goes_on(
    make_recipe: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    programs, own = tmp_path / "bin", tempfile.mkdtemp(dir="/tmp", prefix="slurm")  # its sockets' names are short
    written(programs, srun=SRUN, scontrol=SCONTROL, squeue=SQUEUE)
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
        "STATE": "RUNNING",
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
        until(lambda: len(steps()) > 1, "two steps", seconds=300.0)
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
