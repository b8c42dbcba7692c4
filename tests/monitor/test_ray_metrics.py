"""Figures at Ray's agents, as Prometheus reads them. Needs ray[default]: `make test-trackers`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from listening import free_port

from plaudit.monitor.settings import LogSettings
from plaudit.trackers.opening import opened_trackers

if find_spec("ray") is None or find_spec("opencensus") is None:
    pytest.skip("ray[default] is not installed", allow_module_level=True)


def test_a_local_run_has_no_agents(tmp_path: Path) -> None:
    asked = LogSettings(trackers={"ray": "plaudit"})
    with (
        pytest.raises(ValueError, match=r"log\.trackers\.ray .*runtime=ray"),
        opened_trackers(asked, tmp_path, {"runtime": {"kind": "local"}}, resumed_after=0),
    ):
        pass


@pytest.mark.slow
def test_prometheus_finds_a_runs_figures(make_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    own, port, exported = tempfile.mkdtemp(dir="/tmp", prefix="prom"), free_port(), free_port()
    environment = os.environ | {"RAY_TMPDIR": own, "RAY_AUTH_MODE": "disabled"}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    start += ["--num-cpus", "2", "--object-store-memory", str(100 << 20), "--metrics-export-port", str(exported)]
    runtime = {"kind": "ray", "address": f"127.0.0.1:{port}"}
    recipe = make_recipe("sft", tmp_path, runtime=runtime, train={"steps": 40}, log={"trackers": {"ray": "plaudit"}})
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe))
    with (tmp_path / "log").open("wb") as log:
        head = subprocess.Popen(start, env=environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 60
            while b"Ray runtime started" not in (tmp_path / "log").read_bytes():
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.2)
            command = [sys.executable, "-m", "plaudit", "train", str(tmp_path / "sft.yaml")]
            run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            found = ""
            while "ray_plaudit_loss_policy{" not in found:
                assert time.monotonic() < end + 60, found[-2000:]
                assert run.poll() in (None, 0), (tmp_path / "log").read_text()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{exported}/metrics", timeout=5) as answer:
                        found = answer.read().decode()
                except (urllib.error.URLError, ConnectionError):
                    pass
                time.sleep(0.2)
            run.wait(60)
        finally:
            head.terminate()
            head.wait(30)
    line = next(one for one in found.splitlines() if one.startswith("ray_plaudit_loss_policy{"))
    assert 'run="run"' in line
    assert float(line.rpartition(" ")[2]) > 0
