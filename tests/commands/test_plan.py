"""`plaudit plan` from a profile that is written by hand: what it prints, as text and JSON, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from told import says

from plaudit import SettingsError, load_settings, run
from plaudit.commands.cli import main
from plaudit.preflight.choice import chosen
from plaudit.preflight.cost import Costs
from plaudit.preflight.placement import Placement
from plaudit.preflight.profile import Curve, Link, Profile
from plaudit.preflight.report import Outcome
from plaudit.preflight.trial import trial
from plaudit.runs.planned import key_of
from plaudit.settings.recipes import read_settings
from plaudit.settings.tree import Settings

Recipe = Callable[..., dict[str, Any]]
FLAT = Curve((0.001, 1e-4, 0.0, 0.0), (0.001, 1e-4, 0.0, 0.0))


def profile(hardware: str = "four cores", **changes: Any) -> Profile:
    passes = {f"{role}/{kind}": FLAT for role in ("policy", "reference") for kind in ("train", "score")}
    decode = Curve((0.01, 1e-3, 0.0, 0.0), (0.01, 1e-3, 0.0, 0.0))
    links = {name: Link(1e-4, 1e9) for name in ("all_reduce", "all_gather", "store")}
    given: dict[str, Any] = {"passes": passes, "updates": {"policy": 0.01}, "decode": decode, "links": links}
    return Profile(hardware=hardware, devices=4, gpu=False, capacity=1e9, items=24, prompts=(8, 12), **given | changes)


@pytest.fixture
def recipe(make_recipe: Recipe, tmp_path: Path) -> Path:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(make_recipe("grpo", tmp_path)))
    (tmp_path / "run.profile.json").write_text(profile(rewards={"varied": (0.0, 0.5)}).text())
    return path


def called(*words: object) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_bottleneck_and_the_change_that_would_help_are_named(recipe: Path) -> None:
    text = called("plan", recipe, "--price", "3")
    assert "grpo on four cores, 4 devices: one process, threads=1" in text
    assert "bottleneck: varied" in text
    assert "what would help most: " in text
    for name in ("now", "best", "symmetric", "heuristic"):
        assert f"\n  {name} " in text


def test_stages_of_a_pipeline_are_planned(recipe: Path) -> None:
    words = ["runtime=ray", "runtime.mesh={pipeline: 2}"]
    text = called("plan", recipe, *words)
    assert "2 ranks, 1 rollout worker, pipeline=2, threads=1" in text
    for line in ("\n  rank of stage 0 ", "\n  rank of stage 1 ", "\n  rollout worker "):
        assert line in text
    told = json.loads(called("plan", recipe, "--json", *words))["plans"]
    assert told["now"]["settings"] == {}, "the recipe's own"
    assert told["now"]["memory"].keys() == {"driver", "rank of stage 0", "rank of stage 1", "rollout worker"}


def test_stages_that_cannot_be_planned_are_refused(recipe: Path) -> None:
    apart = "runtime.placement={reference: {workers: 1, mesh: {pipeline: 2}}}"
    for words, named in (
        ([apart], r"runtime\.placement\.reference has stages.*without mesh\.pipeline"),
        (["runtime.mesh={pipeline: 3}"], r"pipeline=3 does not divide 2 layers"),
    ):
        result = CliRunner().invoke(main, ["plan", str(recipe), "runtime=ray", *words])
        assert result.exit_code == 2
        assert re.search(named, result.output), result.output


def test_a_profile_of_a_busy_machine_ranks_no_placements(recipe: Path) -> None:
    """Its note comes first, and a sentence says why nothing is advised. There is no best plan, and auto is refused."""
    note = "measured beside other programs, which kept 1.2 processes a core busy"
    noisy = profile(rewards={"varied": (0.0, 0.5)}, notes=(note, "usual values"), busy=True)
    (recipe.parent / "run.profile.json").write_text(noisy.text())
    text = called("plan", recipe)
    assert text.startswith(f"note: {note}\nnote: usual values\n")
    assert "placements are not ranked, since other programs" in text
    for words in ("what would help most", "\n  best ", "\n  symmetric ", "\n  free "):
        assert words not in text
    told = json.loads(called("plan", recipe, "--json"))
    assert (told["advice"], "best" in told["plans"], told["notes"][0]) == (None, False, note)
    with pytest.raises(SettingsError, match=r"runtime\.placement=auto: .*run\.profile\.json .*--check"):
        chosen(load_settings(str(recipe), ["runtime.placement=auto"]))
    placed = chosen(load_settings(str(recipe), ["runtime.placement=heuristic"]), lambda text: None)
    assert placed.runtime.kind == "ray", "a rule that needs no ranking"


def test_json_says_the_same_and_the_plan_lies_beside_the_run(recipe: Path) -> None:
    told = json.loads(called("plan", recipe, "--json", "--price", "3"))
    assert told == json.loads((recipe.parent / "run.plan.json").read_text())
    now = told["plans"]["now"]
    assert now["step"] == pytest.approx(sum(now["calls"].values()))
    assert now["hours"] == pytest.approx(4 * now["step"] / 3600)
    assert now["cost"] == pytest.approx(now["hours"] * 4 * 3)
    assert told["bottleneck"]["call"] == "varied"
    assert json.loads(called("plan", recipe, "--json", "train.steps=null", "train.epochs=2"))["steps"] == 2 * 24 // 3
    assert told["plans"]["best"]["step"] <= min(plan["step"] for plan in told["plans"].values())
    again = read_settings(
        str(recipe), [f"{k}={str(v).lower()}" for k, v in told["plans"]["heuristic"]["settings"].items()]
    )
    assert again.runtime.kind == "ray"


@pytest.mark.parametrize("name", ["auto", "heuristic"])
def test_a_run_is_placed_by_a_plan(name: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest, or what people choose: it says which, what else it would take, and keeps the plan beside the run."""
    monkeypatch.setattr("plaudit.preflight.choice.MARGIN", 1.0)
    ran: list[Settings] = []
    monkeypatch.setattr("plaudit.runs.start.run", lambda settings, reporter: ran.append(settings))
    text = called("grpo", recipe, f"runtime.placement={name}", "log.quiet=false")
    told = json.loads((recipe.parent / "run.plan.json").read_text())["plans"]
    plan = told["best" if name == "auto" else name]
    assert f"runtime.placement={name}: " in text
    assert f"{plan['step']:.3g} s a step planned" in text
    [settings] = ran
    assert settings.runtime.kind == plan["settings"]["runtime.kind"]
    assert settings.rollout.workers == plan["settings"].get("rollout.workers", 1)
    assert key_of(settings) == plan["key"], "the run compares itself with the plan"


def test_auto_keeps_a_placement_that_is_not_clearly_slower(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of two placements are off by different amounts, so one that is said to be a little faster may be slower."""
    plans = json.loads(called("plan", recipe, "--json"))["plans"]
    gain = plans["now"]["step"] / plans["best"]["step"]
    assert gain > 1.01
    for margin, name in ((0.99 * gain, "best"), (1.01 * gain, "now")):
        monkeypatch.setattr("plaudit.preflight.choice.MARGIN", margin)
        placed = chosen(load_settings(str(recipe), ["runtime.placement=auto"]), lambda text: None)
        assert key_of(placed) == plans[name]["key"]


def test_python_places_a_run_too(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.preflight.choice.MARGIN", 1.0)
    told: list[str] = []
    placed = chosen(load_settings(str(recipe), ["runtime.placement=auto"]), told.append)
    assert isinstance(placed.runtime.placement, dict)
    assert key_of(placed) == json.loads((recipe.parent / "run.plan.json").read_text())["plans"]["best"]["key"]
    assert says(told[0], "runtime.placement=auto .. s a step planned")
    assert chosen(placed) is placed, "it has a placement already"


def test_a_placement_to_be_chosen_is_not_run_as_it_is(recipe: Path) -> None:
    with pytest.raises(SettingsError, match=r"runtime\.placement=auto .*`plaudit grpo RECIPE`.*chosen\(settings\)"):
        run(load_settings(str(recipe), ["runtime.placement=auto"]))
    (recipe.parent / "run.profile.json").write_text(replace(profile(), capacity=1.0).text())
    result = CliRunner().invoke(main, ["grpo", str(recipe), "runtime.placement=auto"])
    assert says(result.output, "runtime.placement=auto .. run.profile.json .. 4 devices")


@pytest.mark.slow
def test_other_machines_and_more_devices(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "fast.json").write_text(profile("a fast machine", rewards={"varied": (0.0, 0.0)}).text())
    paths = (tmp_path / "run.profile.json", tmp_path / "fast.json")
    slow, fast = json.loads(called("plan", recipe, "--json", "--profile", paths[0], "--profile", paths[1]))
    assert (slow["hardware"], fast["hardware"]) == ("four cores", "a fast machine")
    assert fast["plans"]["now"]["step"] < slow["plans"]["now"]["step"]
    assert json.loads(called("plan", recipe, "--json", "--devices", 16))["devices"] == 16


def test_without_a_profile_it_says_how_to_get_one(recipe: Path) -> None:
    (recipe.parent / "run.profile.json").unlink()
    result = CliRunner().invoke(main, ["plan", str(recipe)])
    assert result.exit_code != 0
    assert "`plaudit profile RECIPE` measures one" in result.output


@pytest.mark.slow
def test_torch_is_not_loaded(recipe: Path, environment: dict[str, str]) -> None:
    code = "import sys; from plaudit.commands.cli import main; main(sys.argv[1:], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "plan", str(recipe)], env=environment, check=True, capture_output=True)


@pytest.mark.slow
def test_a_check_runs_steps_of_a_plan(
    recipe: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    costs = Costs(read_settings(str(recipe), []), profile(), 1)
    outcome = Outcome(costs, 0.0)
    seconds, memory = trial(Placement(threads=1).placed(outcome.settings), steps=2)
    assert 0 < seconds < 60
    assert memory is None or 2**27 < memory < 2**33, "a process with torch"
