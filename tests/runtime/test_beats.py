"""Signs of life that processes of a node leave for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from plaudit.runtime import beats, stage

NODE = "a node"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(beats.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(beats, "PAUSE", 0.01)
    return tmp_path / f"plaudit-{os.getuid()}" / NODE


def test_a_process_gives_signs_until_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_failure", [""])
    me = os.getpid()
    assert beats.fresh(NODE, [me], 60.0) == []
    beats.begin(NODE)
    until(lambda: beats.fresh(NODE, [me], 0.5) == [me])
    stage.fail("its engine is gone")
    until(lambda: beats.fresh(NODE, [me], 0.5) == [])


def test_files_of_processes_that_were_killed_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_failure", ["it leaves no sign"])
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    folder.mkdir(parents=True)
    (folder / str(ended.pid)).touch()
    beats.begin(NODE)
    assert not (folder / str(ended.pid)).exists()


def test_signs_in_a_folder_that_others_could_write_to_do_not_count(folder: Path, tmp_path: Path) -> None:
    """A link may lead to any files, which must not be touched or removed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("thesis.tex", "999999999", str(os.getpid())):
        (elsewhere / name).touch()
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    beats.begin(NODE)
    assert {path.name for path in elsewhere.iterdir()} == {"thesis.tex", "999999999", str(os.getpid())}
    assert beats.fresh(NODE, [os.getpid()], 60.0) == []


def test_without_a_folder_for_signs_nobody_is_vouched_for(folder: Path) -> None:
    folder.parent.write_text("a file is in its place")
    beats.begin(NODE)
    assert beats.fresh(NODE, [os.getpid()], 60.0) == []
