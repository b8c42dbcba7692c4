"""Who may use a cluster that a run starts. That others are refused is tested in `test_ray.py`."""

from __future__ import annotations

import os
import sys

import pytest

from plaudit.runtime.settings import RuntimeSettings
from plaudit.runtime.token import QUIET, prepare

GIVEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@pytest.fixture(autouse=True)
def before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported it, and whose user said nothing."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in (*GIVEN, *QUIET):
        monkeypatch.setenv(name, "given back afterwards")
        monkeypatch.delenv(name)


def test_a_cluster_of_ours_has_a_token_of_its_own() -> None:
    prepare(RuntimeSettings(kind="ray"))
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_token_that_the_user_gave_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "5" * 64)
    prepare(RuntimeSettings(kind="ray"))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "5" * 64)


def test_what_the_user_or_a_running_cluster_decided_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(RuntimeSettings(kind="ray", address="10.0.0.1:6379"))
    assert not any(name in os.environ for name in GIVEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    prepare(RuntimeSettings(kind="ray"))
    assert (os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN")) == ("disabled", None)


def test_ray_that_was_imported_has_read_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    prepare(RuntimeSettings(kind="ray"))
    assert not any(name in os.environ for name in (*GIVEN, *QUIET))
