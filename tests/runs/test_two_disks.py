"""A run on two nodes of which one sees another disk where the run's folder is: checkpoints are collected and spread."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

if find_spec("ray") is None:  # found, not imported: ray reads its environment when it is
    pytest.skip("ray is not installed: pip install -e '.[ray]'", allow_module_level=True)

from kills import same_weights
from listening import free_port

from plaudit import Run

Recipe = Callable[..., dict[str, Any]]
NODE = "--block --num-cpus 1 --object-store-memory 104857600"
OTHER = ["unshare", "-m", "bash", "-c"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Its address and environment. For the second node, a disk of its own lies over the folder of runs."""
    (tmp_path / "apart").mkdir()
    mount = f"mount -t tmpfs none {tmp_path / 'apart'}"
    if shutil.which("unshare") is None or subprocess.run([*OTHER, mount], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount: it takes root, as in a container")
    own = tempfile.mkdtemp(dir="/tmp", prefix="two")
    environment = os.environ | {"RAY_TMPDIR": own, "RAY_AUTH_MODE": "disabled"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    port = free_port()
    head = f"ray start --head --port {port} --node-ip-address 127.0.0.1 --include-dashboard false {NODE}"
    nodes = []
    try:
        for name, words in (
            ("head", ["bash", "-c", f"exec {head}"]),
            ("second", [*OTHER, f"{mount} && exec ray start --address 127.0.0.1:{port} {NODE}"]),
        ):
            log = tmp_path / name
            with log.open("wb") as out:
                nodes.append(subprocess.Popen(words, env=environment, stdout=out, stderr=out))
            end = time.monotonic() + 60
            while "Ray runtime started" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
        yield f"127.0.0.1:{port}", environment | {"SECOND": str(nodes[1].pid)}
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            node.wait(60)
        shutil.rmtree(own, ignore_errors=True)


def test_checkpoints_need_no_folder_that_all_nodes_see(
    cluster: tuple[str, dict[str, str]], make_recipe: Recipe, tmp_path: Path
) -> None:
    """Two ranks with shards, each on its own disk: the files are those of a run on one disk, and it resumes."""
    address, environment = cluster

    def done(folder: str, *words: str) -> Run:
        runtime = {"kind": "ray", "address": address, "num_training_workers": 2, "strategy": "fsdp"}
        more: dict[str, Any] = {"runtime": runtime, "optimizer": {"schedule": "constant"}}
        recipe = tmp_path / f"{folder}.yaml"
        recipe.write_text(yaml.safe_dump(make_recipe("sft", tmp_path / folder, **more, save={"every": 1})))
        command = [sys.executable, "-m", "plaudit.commands.cli", "sft", str(recipe), *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return Run(tmp_path / folder / "run")

    whole = done("seen", "train.steps=3")
    done("apart", "train.steps=2")
    apart = done("apart", "train.steps=3", "resume=latest")
    assert same_weights(whole, apart)
    there = Path(f"/proc/{environment['SECOND']}/root{apart.folder}/checkpoints/state")
    assert [path.name for path in there.iterdir()] == ["epoch1epochstep2globalstep2"], "its own disk, with what it took"
    names = [sorted(str(p.relative_to(run.model)) for p in run.model.rglob("*")) for run in (whole, apart)]
    assert names[0] == names[1]
    for role in ("policy", "state"):
        for file in (whole.folder / "checkpoints" / role / apart.saved[-1]).glob("*.safetensors"):
            assert file.read_bytes() == (apart.folder / file.relative_to(whole.folder)).read_bytes()
