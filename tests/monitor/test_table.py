"""The table of a folder's runs, with figures worked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from starlette.testclient import TestClient

from plaudit.monitor import table as module
from plaudit.page.app import application


def client_of(folder: Path) -> TestClient:
    return TestClient(application(folder), base_url="http://127.0.0.1:8010")


def asked(client: TestClient) -> tuple[dict[str, Any], dict[str, Any]]:
    found = client.get("/api/table")
    assert found.status_code == 200, found.text
    return found.json(), {row["name"]: row for row in found.json()["rows"]}


def record(folder: Path, *figures: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in figures)


def test_a_row_has_the_last_and_the_best_figure_with_their_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=1)
    (run / "metrics.jsonl").unlink()
    client = client_of(tmp_path)
    assert asked(client)[1]["one"]["figures"] == {}
    losses = ({"step": 2, "validation/loss": 0.5}, {"step": 4, "validation/loss": 0.7})
    record(run, {"step": 1, "reward/mean": 0.1, "kl/reference": 3}, {"step": 2, "reward/mean": 0.9}, *losses)
    record(run, {"step": 3, "reward/mean": 0.9}, {"step": 4, "reward/mean": None}, {"reward/mean": 7}, {"step": "x"})
    (run / "evaluations.jsonl").write_text('{"step": 2, "evaluation/reward/mean": 1.5}\n')
    found, rows = asked(client)
    assert rows["one"]["figures"] == {
        "reward/mean": [0.9, 3, 0.9, 2],
        "validation/loss": [0.7, 4, 0.5, 2],
        "kl/reference": [3, 1, None, None],
        "evaluation/reward/mean": [1.5, 2, 1.5, 2],
    }
    assert (rows["one"]["state"], rows["one"]["method"], rows["one"]["step"]) == ("done", "ppo", 1)
    assert found["pending"] == 0
    record(run, {"step": 5, "reward/mean": 1.1, "validation/loss": 0.4})
    figures = asked(client)[1]["one"]["figures"]
    assert (figures["reward/mean"], figures["validation/loss"]) == ([1.1, 5, 1.1, 5], [0.4, 5, 0.4, 5])


def test_only_settings_that_differ_have_columns_and_a_run_that_cannot_be_read_has_a_row(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=2)
    make_run(tmp_path / "b", steps=2, rate=1e-3)
    with (tmp_path / "b" / "settings.yaml").open("a") as file:
        file.write(f"name: b\ndata: {{files: [{'x' * 500}], 1: {{2: 3}}}}\n")
    make_run(tmp_path / "bad", steps=2)
    (tmp_path / "bad" / "settings.yaml").write_text("a: &a [*a]\n")
    (tmp_path / "bad" / "metrics.jsonl").unlink()
    (tmp_path / "bad" / "metrics.jsonl").mkdir()
    make_run(tmp_path / "other", steps=2)
    (tmp_path / "other" / "settings.yaml").write_text("method: sft\nseed: 0\n")
    found, rows = asked(client_of(tmp_path))
    assert rows["bad"]["state"] == "unreadable"
    assert (rows["bad"]["settings"], rows["bad"]["figures"]) == ({}, {})
    assert {"method", "optimizer.learning_rate", "data.files.0"} <= set(found["settings"])
    assert "name" not in found["settings"]
    assert rows["a"]["settings"]["optimizer.learning_rate"] == "0.0003"
    assert "optimizer.learning_rate" not in rows["other"]["settings"]
    assert len(rows["b"]["settings"]["data.files.0"]) == module.LONG
    (tmp_path / "bad" / "metrics.jsonl").rmdir()
    (tmp_path / "bad" / "settings.yaml").write_text((tmp_path / "a" / "settings.yaml").read_text())
    (tmp_path / "other" / "settings.yaml").write_text((tmp_path / "a" / "settings.yaml").read_text())
    assert asked(client_of(tmp_path))[0]["settings"] == ["optimizer.learning_rate", "data.files.0", "data.1.2"]


def test_a_hundred_runs_are_read_in_parts_and_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        run = tmp_path / f"run{number}"
        run.mkdir()
        (run / "settings.yaml").write_text(f"method: sft\nseed: {number}\n")
        record(run, *({"step": step, "reward/mean": step * number / 50} for step in range(1, 51)))
    client = client_of(tmp_path)
    clock = iter(range(10_000))
    with monkeypatch.context() as patched:
        patched.setattr(module, "PATIENCE", 40)
        patched.setattr(module.time, "monotonic", lambda: next(clock))
        found, _ = asked(client)
    assert found["pending"] == 61
    read: list[Path] = []
    lines = module.Followed.keep
    monkeypatch.setattr(
        module.Best, "keep", lambda self, one, keep=module.Best.keep: (read.append(self.path), keep(self, one))
    )
    found, rows = asked(client)
    assert found["pending"] == 0
    assert len(read) == 61 * 50
    assert {name: row["figures"]["reward/mean"] for name, row in rows.items()} == {
        f"run{number}": [number, 50, number, 50 if number else 1] for number in range(100)
    }
    read.clear()
    assert asked(client)[1] == rows
    assert read == []
    assert module.Followed.keep is lines
