"""The core without its optional rooms: methods run in a copy of the package from which they were removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shape import OPTIONAL, ROOT

METHODS = ("sft", "reward", "ppo", "grpo")
RUNS = """
import json, sys
from pathlib import Path
import plaudit
for recipe in json.loads(sys.argv[1]):
    run = plaudit.run(plaudit.load_settings(recipe))
    assert (run.model / "config.json").is_file() and len(run.metrics) == 2, recipe["method"]
print(plaudit.__file__)
print(sorted(name for name in sys.modules if name.startswith("plaudit.")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("gone", [OPTIONAL, *((room,) for room in OPTIONAL)], ids="+".join)
def test_methods_run_without(gone: tuple[str, ...], make_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def left_out(folder: str, names: list[str]) -> list[str]:
        here = [f"{room}{ending}" for room in gone for ending in ("", ".py")] if Path(folder) == ROOT else []
        return ["__pycache__", *here]

    shutil.copytree(ROOT, tmp_path / "source" / "plaudit", ignore=left_out)
    recipes = [make_recipe(method, tmp_path / method, train={"steps": 2}) for method in METHODS]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "source"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUNS, json.dumps(recipes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    where, loaded = done.stdout.splitlines()[-2:]
    assert Path(where) == tmp_path / "source" / "plaudit" / "__init__.py"
    assert "'plaudit.runs.start'" in loaded
    assert not any(f"'plaudit.{room}" in loaded for room in gone)


@pytest.mark.parametrize(
    ("room", "asked"),
    [("servers", "runtime.servers"), ("trackers", "log.trackers"), ("preflight", "runtime.placement=auto")],
)
def test_a_setting_that_needs_a_removed_room_says_so(room: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from plaudit.support import rooms

    monkeypatch.setattr(rooms.importlib.util, "find_spec", lambda name: None)
    assert rooms.optional(room) is None
    with pytest.raises(ValueError, match=f"{asked} needs plaudit.{room}"):
        rooms.optional(room, asked_by=asked)
