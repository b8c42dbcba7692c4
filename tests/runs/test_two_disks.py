"""A run on two nodes of which one sees another disk where the run's folder is: checkpoints are collected and spread."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
LOSES = """
import sys
from killed_at import At
from plaudit import load_settings, run

killer = At(("rank",), lambda killer, method: killer.steps == 3)
with killer.at_work():
    run(load_settings(sys.argv[1], sys.argv[2:]), hooks=[killer.hook])
assert killer.hit
"""


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


@pytest.fixture
def done(cluster: tuple[str, dict[str, str]], make_recipe: Recipe, tmp_path: Path) -> Callable[..., Run]:
    """done(folder, words of the command line): a run of two ranks with shards, each on a node of its own."""
    address, environment = cluster
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def done(folder: str, *words: str, program: Sequence[str] = ("-m", "plaudit.commands.cli", "sft")) -> Run:
        runtime = {"kind": "ray", "address": address, "num_training_workers": 2, "strategy": "fsdp"}
        more: dict[str, Any] = {"runtime": runtime, "optimizer": {"schedule": "constant"}}
        recipe = tmp_path / f"{folder}.yaml"
        recipe.write_text(yaml.safe_dump(make_recipe("sft", tmp_path / folder, **more, save={"every": 1})))
        command = [sys.executable, *program, str(recipe), *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return Run(tmp_path / folder / "run")

    return done


def same_files(whole: Run, checkpoints: Path, name: str) -> bool:
    """Whether the tensors of the last checkpoint of a run are those of another, byte for byte."""
    files = [file for role in ("policy", "state") for file in (whole.folder / "checkpoints" / role / name).iterdir()]
    found = [file.relative_to(whole.folder / "checkpoints") for file in files if file.suffix == ".safetensors"]
    return len(found) > 2 and all(
        (checkpoints / one).read_bytes() == (whole.folder / "checkpoints" / one).read_bytes() for one in found
    )


def test_checkpoints_need_no_folder_that_all_nodes_see(
    cluster: tuple[str, dict[str, str]], done: Callable[..., Run]
) -> None:
    """The files are those of a run on one disk, and it resumes."""
    whole = done("seen", "train.steps=3")
    done("apart", "train.steps=2")
    apart = done("apart", "train.steps=3", "resume=latest")
    assert same_weights(whole, apart)
    there = Path(f"/proc/{cluster[1]['SECOND']}/root{apart.folder}/checkpoints/state")
    assert [path.name for path in there.iterdir()] == ["epoch1epochstep2globalstep2"], "its own disk, with what it took"
    names = [sorted(str(p.relative_to(run.model)) for p in run.model.rglob("*")) for run in (whole, apart)]
    assert names[0] == names[1]
    assert same_files(whole, apart.folder / "checkpoints", apart.saved[-1])


def test_with_an_address_nothing_of_checkpoints_passes_the_driver(
    cluster: tuple[str, dict[str, str]], done: Callable[..., Run], tmp_path: Path
) -> None:
    whole, there = done("seen", "train.steps=3"), tmp_path / "there"
    first = done("apart", "train.steps=2", f"save.to=file://{there}")
    assert first.saved == ["epoch1epochstep2globalstep2"], "of two, the one that it fetched at its end"
    assert sorted(path.name for path in (there / "run" / "state").iterdir())[-1] == first.saved[0]
    disks = [first.folder, Path(f"/proc/{cluster[1]['SECOND']}/root{first.folder}")]
    assert [path for disk in disks for path in disk.glob("checkpoints/*/.writing*")] == []
    shutil.rmtree(first.folder)
    apart = done("apart", "train.steps=3", f"save.to=file://{there}", "resume=latest")
    assert "the driver does" not in (apart.folder / "log.txt").read_text()
    assert same_weights(whole, apart)
    assert same_files(whole, there / "run", apart.saved[-1]), "models can be loaded from there"


def test_a_lost_rank_goes_on_from_what_only_the_address_has(done: Callable[..., Run], tmp_path: Path) -> None:
    whole = done("seen", "train.steps=5")
    apart = done("apart", "train.steps=5", f"save.to=file://{tmp_path}/there", program=("-c", LOSES))
    said = (apart.folder / "log.txt").read_text()
    assert re.search(r"lost training rank .*; continuing from epoch1", said)
    assert re.search(r"resumed epoch1epochstep[123]globalstep[123]: ", said)
    assert same_weights(whole, apart)
    assert same_files(whole, tmp_path / "there" / "run", apart.saved[-1])


def test_where_a_rank_does_not_reach_the_address_the_driver_copies(done: Callable[..., Run], tmp_path: Path) -> None:
    whole, there = done("seen", "train.steps=2"), tmp_path / "apart" / "there"
    apart = done("apart", "train.steps=2", f"save.to=file://{there}")
    log = (apart.folder / "log.txt").read_text()
    assert "so the driver does" in log
    assert "another place for a rank" in log
    assert same_weights(whole, apart)
    assert len(apart.saved) == 2, "the driver has them"
    assert same_files(whole, there / "run", apart.saved[-1])
