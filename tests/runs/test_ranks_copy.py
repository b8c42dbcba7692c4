"""Ranks copy a run's checkpoints to its address themselves, and the driver may be killed while they do."""

from __future__ import annotations

import json
import shutil
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

from kills import same_weights

from plaudit import load_settings, run
from plaudit.loop.checkpoint import Store
from plaudit.loop.copies import Copies

pytestmark = pytest.mark.slow

Recipe = Callable[..., dict[str, Any]]
DRIVER = """
import json, os, signal, sys
from plaudit import load_settings, run
from plaudit.loop.copies import Copies

def publish(copies, folder, role, name):
    raise AssertionError("the driver copies")

def killed(moment):
    if moment.progress.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Copies.publish = publish
run(load_settings(json.loads(sys.argv[1])), hooks=[killed])
"""


@pytest.mark.parametrize("strategy", ["fsdp", "server"])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_another_machine_goes_on_after_a_killed_driver(
    kind: str,
    strategy: str,
    request: pytest.FixtureRequest,
    make_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = (request.getfixturevalue("bucket") if kind == "s3" else "file://") + f"{tmp_path}/there"
    more: dict[str, Any] = {"runtime": {"kind": "ray", "strategy": strategy, "num_training_workers": 2}}
    more |= {"optimizer": {"schedule": "constant"}, "train": {"steps": 5}}
    whole = run(load_settings(make_recipe("sft", tmp_path / "whole", **more)))
    more |= {"save": {"every": 1, "to": there}}
    words = [sys.executable, "-c", DRIVER, json.dumps(make_recipe("sft", tmp_path / "here", **more))]
    killed = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    left = Copies(f"{there}/run").names()
    assert left
    assert {*left} <= {f"epoch1epochstep{step}globalstep{step}" for step in (1, 2)}
    shutil.rmtree(tmp_path / "here")

    def publish(copies: Copies, folder: Path, role: str, name: str) -> None:
        raise AssertionError("the driver copies")

    monkeypatch.setattr(Copies, "publish", publish)
    resumed = run(load_settings(make_recipe("sft", tmp_path / "other", **more), ["resume=latest"]))
    assert [step["step"] for step in resumed.metrics] == [1, 2, 3, 4, 5]
    assert same_weights(whole, resumed)
    fetched = Store(tmp_path / "fetched", Copies(f"{there}/run"))
    assert fetched.latest() == (resumed.saved[-1], []), "it is whole"
    assert len(fetched.known()) == 2, "save.keep"


@pytest.mark.parametrize("strategy", ["fsdp", "server"])
def test_where_ranks_write_elsewhere_the_driver_copies(strategy: str, make_recipe: Recipe, tmp_path: Path) -> None:
    """Each process has a memory:// of its own."""
    there = f"memory://{tmp_path}/there"
    more: dict[str, Any] = {"runtime": {"kind": "ray", "strategy": strategy, "num_training_workers": 2}}
    done = run(load_settings(make_recipe("sft", tmp_path, **more, save={"every": 2, "to": there})))
    assert "another place for a rank" in (done.folder / "log.txt").read_text()
    fetched = Store(tmp_path / "fetched", Copies(f"{there}/run"))
    assert fetched.latest() == (done.saved[-1], [])
    assert fetched.known() == done.saved
