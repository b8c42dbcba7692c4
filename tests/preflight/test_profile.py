"""Profiles: fits, files, and a measurement of a tiny run from its command to the warning of a slow step."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from plaudit.commands.cli import main
from plaudit.monitor.health import Ledger
from plaudit.preflight import measure
from plaudit.preflight.machine import cores
from plaudit.preflight.measure import fitted
from plaudit.preflight.profile import Curve, read_profile
from plaudit.settings.tree import SettingsError

Recipe = Callable[..., dict[str, Any]]


def test_a_fit_finds_the_coefficients() -> None:
    true = (0.5, 0.01, 0.0002, 0.03)
    points = []
    for numbers in ((1, 10, 100, 4), (1, 50, 900, 10), (2, 100, 500, 90), (1, 80, 6000, 1), (3, 40, 20, 7)):
        points.append((numbers, sum(a * b for a, b in zip(true, numbers, strict=True))))
    assert fitted(points) == pytest.approx(true)


def test_no_coefficient_is_negative() -> None:
    """The second amount rises while seconds fall: it is left out."""
    found = fitted([((1.0, 1.0), 3.0), ((1.0, 2.0), 2.0), ((1.0, 3.0), 1.0)])
    assert found[1] == 0.0
    assert 1.0 < found[0] < 3.0


def test_threads_share_a_part_of_the_work() -> None:
    """12 s on one thread and 6 s on four: 8 s of them are spread."""
    curve = Curve((12.0,), (6.0,), threads=4)
    assert [curve.seconds((1.0,), threads) for threads in (1, 2, 4, 8)] == pytest.approx([12.0, 8.0, 6.0, 6.0])


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="plaudit profile RECIPE"):
        read_profile(tmp_path / "no.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SettingsError, match="is not a profile"):
        read_profile(tmp_path / "other.json")


def called(*words: str) -> str:
    result = CliRunner().invoke(main, [*words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_profile_plan_run_and_warning(
    make_recipe: Recipe, judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure a tiny PPO with a judge, plan it, and run it with a plan that says that a step takes no time."""
    monkeypatch.setattr(measure, "SECONDS", 0.05)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0,) * 3)
    monkeypatch.setattr(measure, "ticks", list)
    rewards = [*make_recipe("ppo", tmp_path)["rewards"], {"kind": "judge", "path": str(judge)}]
    recipe = make_recipe("ppo", tmp_path, rewards=rewards, train={"steps": 7}, log={"quiet": False})
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(recipe))
    assert " a pass, " in called("profile", str(tmp_path / "ppo.yaml"))
    found = read_profile(tmp_path / "run.profile.json")
    assert found == read_profile(tmp_path / "run.profile.json")
    assert json.loads(found.text())["hardware"] == found.hardware
    kinds = {f"{role}/{kind}" for role in ("policy", "critic") for kind in ("train", "score")}
    assert set(found.passes) == {*kinds, "reference/score", "judge 1/score"}
    assert all(sum(curve.one) > 0 for curve in found.passes.values())
    assert set(found.rewards) == {"varied"}
    assert found.links["all_reduce"].bandwidth > 1e6
    assert not found.busy

    text = called("plan", str(tmp_path / "ppo.yaml"), "--price", "2")
    for words in ("bottleneck: ", "policy trains", "judge 1", "symmetric", "heuristic", "cost "):
        assert words in text
    plan = json.loads(called("plan", str(tmp_path / "ppo.yaml"), "--json"))
    now = plan["plans"]["now"]
    assert now["step"] == pytest.approx(sum(now["calls"].values()))

    path = tmp_path / "run.plan.json"
    plan["plans"]["now"] |= {"step": 1e-4, "calls": dict.fromkeys(now["calls"], 0.0)}
    path.write_text(json.dumps(plan))
    called("ppo", str(tmp_path / "ppo.yaml"))
    warned = [json.loads(line) for line in (tmp_path / "run" / "health.jsonl").read_text().splitlines()]
    mine = Ledger(warned).entries["misplanned"]
    assert "more than profiled" in mine["saw"]
    assert mine["numbers"]["planned"] == 1e-4

    called("ppo", str(tmp_path / "ppo.yaml"), "overwrite=true", "rollout.max_tokens=9")  # another run than planned
    assert "misplanned" not in (tmp_path / "run" / "health.jsonl").read_text()


@pytest.mark.slow
def test_a_busy_machine_is_noted_first(make_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.05)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25 * cores(), 0.0, 0.0))
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(make_recipe("grpo", tmp_path)))
    called("profile", str(tmp_path / "grpo.yaml"))
    found = read_profile(tmp_path / "run.profile.json")
    assert found.busy
    assert found.notes[0] == "measured beside other programs, which kept 1.2 processes a core busy"
    assert called("plan", str(tmp_path / "grpo.yaml")).startswith(f"note: {found.notes[0]}")


def test_time_that_other_machines_took_is_a_share_of_all() -> None:
    """/proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, in ticks of all cores."""
    before = [100, 0, 50, 800, 10, 0, 0, 40]
    after = [160, 0, 60, 915, 10, 0, 0, 55]
    assert measure.stolen_share(before, after) == pytest.approx(15 / 200)
    assert measure.stolen_share(before, before) == 0.0
    assert measure.stolen_share([], []) == 0.0, "a system without /proc"
    assert len(measure.ticks()) in (0, 8)


def test_repeats_of_the_same_work_are_compared() -> None:
    """A clock that the work moves: the first try warms up; then 20, 40, 30, 80 and 30 ms, whose median is 30."""
    clock, seconds, spreads = [0.0], iter((0.125, 0.02, 0.04, 0.03, 0.08, 0.03)), list[float]()

    async def work() -> None:
        clock[0] += next(seconds)

    assert asyncio.run(measure.timed(work, lambda: clock[0], spreads)) == pytest.approx(0.02)
    assert spreads == pytest.approx([0.5])
