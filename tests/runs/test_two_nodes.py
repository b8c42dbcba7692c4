"""A cluster that is started by hand, with the lines of docs/distributed.md as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from listening import free_port

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
SMALL = "--num-cpus 1 --object-store-memory 104857600"
"""What the test adds: two nodes of one machine must share it, and one process is to be on each."""


FOUND = """
from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.ray import RayRuntime
print(RayRuntime(RuntimeSettings(kind="ray", address="auto")).start())
"""
"""Of a cluster on this machine Ray finds the token too."""


def line(start: str) -> str:
    """The one line of the page's section that begins so."""
    section = PAGE.split("## Two nodes by hand")[1].split("\n## ")[0]
    (found,) = re.findall(rf"^    ({re.escape(start)}.*)$", section, re.MULTILINE)
    return str(found)


def test_two_nodes_by_hand(make_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    own = tempfile.mkdtemp(
        dir="/tmp", prefix="two"
    )  # where `auto` finds no other cluster; its sockets' names are short
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RAY_TMPDIR": own}
    environment.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # where kernels are
    environment["HOME"] = str(tmp_path)  # of somebody who has no token, nor was given one by another test
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    port = str(free_port())
    exports = f"{line('export RAY_AUTH')}; {line('export RAY_health')}"
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(yaml.safe_dump(make_recipe("grpo", tmp_path / "runs", train={"steps": 2})))
    address = f"127.0.0.1:{port}"

    def started(command: str, name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as log:
            whole = ["bash", "-c", f"{exports}; exec {command}"]
            return subprocess.Popen(whole, env=environment, stdout=log, stderr=log)

    def said(name: str) -> str:
        return (tmp_path / name).read_text()

    def waits(name: str) -> None:
        end = time.monotonic() + 60
        while "Ray runtime started" not in said(name):
            assert time.monotonic() < end, said(name)
            time.sleep(0.1)

    nodes = []
    subprocess.run(["bash", "-c", line("(umask 077")], env=environment, check=True, timeout=60)
    token = (tmp_path / ".ray" / "auth_token").stat()
    assert (token.st_size, stat.S_IMODE(token.st_mode)) == (64, 0o600)
    try:
        head = line("ray start --head").replace("6379", port) + " --include-dashboard false"
        nodes.append(started(f"{head} --node-ip-address 127.0.0.1 {SMALL}", "head"))
        waits("head")
        second = line("ray start --address").replace("FIRST:6379", address)
        nodes.append(started(f"{second} {SMALL}", "second"))
        waits("second")
        command = line("plaudit grpo").replace("configs/grpo.yaml", str(recipe)).replace("FIRST:6379", address)
        command = command.replace("rollout.workers=4", "rollout.workers=1")

        def runs(command: str) -> None:
            shell = ["bash", "-c", command]
            run = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=180, check=False)
            assert run.returncode == 0, run.stdout + run.stderr

        runs(f"{exports}; {command}")
        log = (tmp_path / "runs" / "run" / "log.txt").read_text()
        assert "2 nodes: 2 CPU" in log, log  # each has room for one of the two processes
        assert "1 training and 1 rollout workers are ready; a local run gives the same bits with threads=1" in log
        assert len((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 2
        runs(f"{sys.executable} -c '{FOUND}'")
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        ends = time.monotonic() + 30
        for node in nodes:  # and with its command, as the page says
            try:
                node.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.kill()
                raise
        shutil.rmtree(own)
