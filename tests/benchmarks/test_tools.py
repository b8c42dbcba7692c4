"""GRPO with a tool beside TRL: what both sides are asked for, and how the outcome is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import tools
from contest import Result


def test_both_sides_may_call_the_tool_and_are_paid_for_right_answers(tmp_path: Path) -> None:
    task = tools.task_of(tmp_path, threads=2, repeats=3)
    assert (task.tool.rpartition("/")[2], task.lora, task.rows, task.samples) == ("calculator.py:calculate", 16, 32, 8)
    assert [one["function"] for one in task.rewards] == ["plaudit.tasks.stories:right"]
    assert task.needed == 4 * 4, "questions of a warm-up and three steps"


def test_a_row_has_rates_and_a_side_that_fails_its_reason() -> None:
    found = Result(rates=[400.0, 600.0, 500.0], costs=[2.0], step_tokens=[1e4], figures={"reward": 0.875}, peak_mib=4e3)
    assert tools.line("ours", found) == {
        "side": "ours",
        "tok/s": "500",
        "s a step": "20.0",
        "tokens a step": "10000",
        "right": "88%",
        "MiB": "4,000",
    }
    assert tools.line("trl", "it ended early")["MiB"] == "it ended early"


def test_without_the_peer_it_says_what_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="make bench-peers ARGS=trl"):
        tools.started(tmp_path / "run")
