"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plaudit.data.fields import DataError
from plaudit.data.read import scan_rows
from plaudit.evaluate.settings import EvaluationSettings
from plaudit.models.folders import local_folder
from plaudit.models.lora import check_lora
from plaudit.models.settings import LoraSettings, ModelSettings
from plaudit.support.paths import at_home

NOBODYS = "~no such user/x.jsonl"


def test_the_home_folder_and_those_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/some/home")
    assert at_home("~/runs") == Path("/some/home/runs")
    assert at_home("a/~/b") == Path("a/~/b")
    assert at_home(Path(NOBODYS)) == Path(NOBODYS)


def test_a_path_in_the_home_of_nobody_is_named_wherever_one_is_given() -> None:
    """Without the name of the setting it read "Could not determine home directory.", below a traceback."""
    with pytest.raises(FileNotFoundError, match=f"no folder {NOBODYS}"):
        local_folder(NOBODYS)
    with pytest.raises(DataError, match=NOBODYS):
        list(scan_rows(NOBODYS))
    with pytest.raises(ValueError, match=rf"(?s)prompts: .*{NOBODYS}.*model: .*{NOBODYS}"):
        EvaluationSettings(model=NOBODYS, prompts=NOBODYS).check()
    check_lora(ModelSettings(path=NOBODYS, lora=LoraSettings(rank=2)))  # left to whoever loads it
