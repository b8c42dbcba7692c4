"""A run's folder stands for its newest model wherever a model is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from plaudit.models.folders import local_folder


def commit(run: Path, role: str, name: str) -> Path:
    for part in (role, "state"):
        (run / "checkpoints" / part / name).mkdir(parents=True)
    return run / "checkpoints" / role / name


def test_the_newest_committed_checkpoint_by_step_not_by_name(tmp_path: Path) -> None:
    commit(tmp_path, "policy", "epoch1epochstep9globalstep9")
    newest = commit(tmp_path, "policy", "epoch1epochstep10globalstep10")
    (tmp_path / "checkpoints" / "policy" / "epoch1epochstep11globalstep11").mkdir()  # no state: never committed
    assert local_folder(str(tmp_path)) == newest


def test_a_reward_run_stands_for_its_judge(tmp_path: Path) -> None:
    judge = commit(tmp_path, "judge", "epoch1epochstep2globalstep2")
    assert local_folder(str(tmp_path)) == judge


@pytest.mark.parametrize("began", [True, False])
def test_a_run_without_a_checkpoint_is_refused(began: bool, tmp_path: Path) -> None:
    """Where it began none, its log is all that there is."""
    (tmp_path / "log.txt").touch()
    if began:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        local_folder(str(tmp_path))


def test_a_log_beside_a_model_makes_no_run_of_it(tmp_path: Path) -> None:
    for name in ("log.txt", "config.json"):
        (tmp_path / name).touch()
    assert local_folder(str(tmp_path)) == tmp_path


def test_a_misspelt_folder_names_the_nearest_and_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "reward").mkdir(parents=True)
    for path, told in (
        ("runs/rewrad", r"mean runs/reward\?"),
        ("runs/else", "no folder runs/else. Give"),
        ("a/b/c", "Give"),
    ):
        with pytest.raises(FileNotFoundError, match=told):
            local_folder(path)
