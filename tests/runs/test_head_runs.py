"""The head of a run's cluster is lost, or freezes: the run goes on, or ends and can be gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

import kills
from kills import alike

from plaudit import load_settings, run

Recipe = Callable[..., dict[str, Any]]
RUN = """
import json, os, signal, sys, threading
from pathlib import Path
from faults import descendants
from plaudit import load_settings, run

recipe, how, seconds = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


async def hurt(moment):
    if moment.progress.step == 3:
        (head,) = (pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "gcs_server\\n")
        print("head", head, flush=True)
        os.kill(head, how)
        if seconds:
            threading.Timer(seconds, os.kill, (head, signal.SIGCONT)).start()
    return {}


run(load_settings(recipe), hooks=[hurt])
"""
STEPS = {"train": {"steps": 8}, "save": {"every": 1}}


def hurt(
    recipe: dict[str, Any], how: int, environment: dict[str, str], *, seconds: float, ray: float, sign: float = 2.0
) -> Any:
    """A run whose head gets a signal in step 3, and after so many seconds, if any, goes on. Ray's own patience is
    `ray` seconds; all must give a sign within `sign`."""
    more = {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{ray:g}", "RAY_TMPDIR": "/tmp"}
    more["PYTHONPATH"] = f"{environment['PYTHONPATH']}:{Path(kills.__file__).parent}"
    recipe = {**recipe, "runtime": {"kind": "ray", "heartbeat_timeout": sign}}
    command = [sys.executable, "-c", RUN, json.dumps(recipe), str(int(how)), str(seconds)]
    done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=120, check=False)
    (head,) = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("head "))
    with contextlib.suppress(ProcessLookupError):  # a frozen one hears nothing of the end
        os.kill(head, signal.SIGKILL)
    return done


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_head_a_run_ends_by_itself_and_can_be_gone_on_with(
    how: int, make_recipe: Recipe, environment: dict[str, str], tmp_path: Path
) -> None:
    """Ray ends what has no head any more, but waits for ever where it is frozen: there Plaudit makes the end."""
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **STEPS)))
    recipe = make_recipe("grpo", tmp_path / "hurt", **STEPS)
    done = hurt(recipe, how, environment, seconds=0.0, ray=8)
    assert done.returncode == 1, done.stdout + done.stderr
    log = (tmp_path / "hurt" / "run" / "log.txt").read_text()
    assert "the cluster's head has given no sign for 2 s (runtime.heartbeat_timeout). Unless it does within 8 s" in log
    steps = len((tmp_path / "hurt" / "run" / "metrics.jsonl").read_text().splitlines())
    assert 3 <= steps < 8
    assert alike(whole, run(load_settings({**recipe, "resume": "latest"})))


def test_a_head_that_freezes_for_a_moment_leaves_no_trace(
    make_recipe: Recipe, environment: dict[str, str], tmp_path: Path
) -> None:
    whole = run(load_settings(make_recipe("grpo", tmp_path / "whole", **STEPS)))
    recipe = make_recipe("grpo", tmp_path / "hurt", **STEPS)
    # Time enough for the others to give theirs on a busy machine.
    done = hurt(recipe, signal.SIGSTOP, environment, seconds=9.0, ray=60, sign=5.0)
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / "hurt" / "run" / "log.txt").read_text()
    assert said.index("the cluster's head has given no sign") < said.index("the cluster's head answers again")
    assert "lost" not in said
    assert alike(whole, run(load_settings({**recipe, "resume": "latest"})))
