"""Runs beside each other: what differs, figures with intervals, one picture, answers to the same prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

from plaudit import load_settings, run
from plaudit.commands.cli import main
from plaudit.commands.compare import Compared, asked, compare, differing, named, recorded, settings_of
from plaudit.evaluate.statistics import Interval
from plaudit.monitor.sinks import read_jsonl
from plaudit.runs.records import Run
from plaudit.support.visible import visible

pytestmark = pytest.mark.slow

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def runs(make_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    rates = {"slow": 0.001, "fast": 0.01}
    return [
        run(load_settings(make_recipe("grpo", folder, name=name, optimizer={"learning_rate": rate}))).folder
        for name, rate in rates.items()
    ]


@pytest.fixture(scope="module")
def compared(runs: list[Path]) -> Compared:
    return compare([str(folder) for folder in runs], ["limit=6", "sampling.max_tokens=8", "seed=3"])


@pytest.mark.slow
def test_only_settings_that_differ_are_listed(compared: Compared) -> None:
    assert compared.different == {"optimizer.learning_rate": (0.001, 0.01)}


def test_defaults_of_a_reward_that_others_lack_are_no_difference(runs: list[Path], tmp_path: Path) -> None:
    text = (runs[0] / "settings.yaml").read_text()
    tree = yaml.safe_load(text)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({**tree, "rewards": []}))
    found = differing({"with": Run(runs[0]), "without": Run(tmp_path)})
    assert found == {
        "rewards.0.kind": ("function", None),
        "rewards.0.function": (tree["rewards"][0]["function"], None),
    }


def test_prompts_are_sources_whatever_was_set_aside_of_them_or_how_often_they_came(
    runs: list[Path], tmp_path: Path
) -> None:
    tree = yaml.safe_load((runs[0] / "settings.yaml").read_text())
    cases: list[tuple[Any, Any, list[str]]] = [
        ({"a": 3, "b": 1}, None, ["a", "b"]),
        (["a"], "5%", ["a"]),
        ("a", ["c"], ["c"]),
    ]
    for train, validation, prompts in cases:
        tree["data"] |= {"train": train, "validation": validation}
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(tree))
        assert settings_of({"run": Run(tmp_path)}, []).prompts == prompts


def test_answers_are_to_the_same_prompts_by_the_runs_own_reward(compared: Compared) -> None:
    assert list(compared.answers) == ["slow", "fast"]
    asked = [[group[0].prompt.id for group in groups] for groups in compared.answers.values()]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 6
    rewards = {name: [group[0].scores["varied"].value for group in groups] for name, groups in compared.answers.items()}
    for name, figures in compared.measured.items():
        found = figures["reward/varied"]
        assert isinstance(found, Interval)
        assert found.value == pytest.approx(fmean(rewards[name]))  # type: ignore[arg-type]
        assert found.low < found.value < found.high
    pairs = list(zip(rewards["fast"], rewards["slow"], strict=True))
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]  # type: ignore[operator]
    rate = compared.measured["fast"]["win_rate/varied"]
    assert isinstance(rate, Interval)
    assert rate.value == pytest.approx(fmean(wins))
    assert "win_rate/varied" not in compared.measured["slow"], "the first run is what others are compared with"


def test_the_title_says_which_prompts_and_whether_they_were_trained_on(
    compared: Compared, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs trained on them; one of two; none, a file of the folder that this is started in."""
    train = yaml.safe_load((runs[0] / "settings.yaml").read_text())["data"]["train"]
    title = f"6 prompts of {train} (trained on), temperature 1"
    assert compared.asked == title
    assert f"Measured on {title}" in [table.title for table in compared.tables()]
    assert json.loads((compared.folder / "evaluation.json").read_text())["asked"] == title
    tree = yaml.safe_load((runs[1] / "settings.yaml").read_text())
    tree["data"]["train"] = {str(tmp_path / "other.jsonl"): 2}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(tree))
    two = {"one": Run(runs[0]), "two": Run(tmp_path)}
    settings = replace(compared.settings, sampling=replace(compared.settings.sampling, temperature=0.5))
    assert asked(two, settings, 2000) == f"2,000 prompts of {train} (trained on by one), temperature 0.5"
    monkeypatch.chdir(tmp_path)
    settings = replace(settings, prompts=["test.jsonl", str(tmp_path / "other.jsonl")])
    assert asked(two, settings, 3) == (
        "3 prompts of test.jsonl (not trained on), other.jsonl (trained on by two), temperature 0.5"
    )
    splits = {
        name: replace(settings, prompts="made/up", data=replace(settings.data, split=name))
        for name in ("train", "test")
    }
    tree["data"]["train"] = ["made/up"]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(tree))
    said = [asked({"two": Run(tmp_path)}, one, 1) for one in splits.values()]
    assert ["(trained on)" in one for one in said] == [True, False], "another split of a data set"


def test_everything_is_kept_in_a_folder_of_its_own(compared: Compared, runs: list[Path]) -> None:
    assert compared.folder.parent == runs[0].parent / "comparisons"
    assert {path.name for path in compared.folder.iterdir()} == {
        *("evaluation.json", "comparison.png", "comparison.jsonl")
    }
    assert (compared.folder / "comparison.png").read_bytes()[:4] == PNG
    saved = json.loads((compared.folder / "evaluation.json").read_text())
    assert saved["different"]["optimizer.learning_rate"] == {"slow": 0.001, "fast": 0.01}
    figure = saved["measured"]["fast"]["win_rate/varied"]
    assert figure["low"] <= figure["value"] <= figure["high"]
    lines = read_jsonl(compared.folder / "comparison.jsonl")
    assert [line["fast"]["completion"] for line in lines] == [
        group[0].completion.text for group in compared.answers["fast"]
    ]


def test_figures_of_the_last_steps_are_means_over_steps(compared: Compared, runs: list[Path]) -> None:
    metrics = Run(runs[1]).metrics
    figure = compared.recorded["fast"]["reward/mean"]
    assert isinstance(figure, Interval)
    assert figure.value == pytest.approx(fmean(record["reward/mean"] for record in metrics))
    assert figure.count == len(metrics)
    many = [{"step": n, "entropy": float(n), "validation/loss": 9.0 - n if n % 2 else None} for n in range(1, 41)]
    figures = recorded(many)
    assert figures["entropy"].value == 35.5  # type: ignore[union-attr]
    assert (figures["steps"], figures["validation/loss"]) == (40.0, 9.0 - 39)


@pytest.mark.slow
def test_the_command_prints_five_answers_side_by_side(runs: list[Path]) -> None:
    words = [*map(str, runs), "limit=6", "sampling.max_tokens=4", "judge=null"]
    done = CliRunner().invoke(main, ["compare", *words, f"gold={Path(__file__).parents[1] / 'tiny.py'}:varied"])
    assert done.exit_code == 0, done.output
    for text in ("Settings that differ", "optimizer.learning_rate", "win_rate/gold", "5. ", "comparison: "):
        assert text in done.output
    assert "6. " not in done.output
    assert "reward/varied" not in done.output, "a measure of one's own takes the place of the run's"


def test_answers_keep_their_columns_whatever_is_in_them(compared: Compared) -> None:
    """A control character is shown as six; an answer without a measure has one line."""
    foul = {
        name: [
            [replace(group[0], completion=replace(group[0].completion, text="a\x1f\tb\x1b[2J"), scores={})]
            for group in groups
        ]
        for name, groups in compared.answers.items()
    }
    told = StringIO()
    Console(file=told, width=200, markup=False).print(replace(compared, answers=foul).examples())
    drawn = [line for line in visible(told.getvalue()).splitlines()[1:] if line]
    assert len({cell_len(line) for line in drawn}) == 1, told.getvalue()
    rows = [line for line in drawn if line.startswith("\u2502")]
    assert [line.count(r"a\u001f") for line in rows] == [2] * 5, "each prompt's answers have one line"


@pytest.mark.slow
@pytest.mark.parametrize("advice", ["", "PNG files need a library"])
def test_runs_without_policies_are_compared_by_their_records(
    advice: str, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the library of pictures, which then says how to get it."""
    monkeypatch.setattr("plaudit.commands.compare.NO_PICTURES", advice)
    monkeypatch.setattr("plaudit.commands.cli.NO_PICTURES", advice)
    for name, seed in (("one", 1), ("two", 2)):
        run(load_settings(make_recipe("reward", tmp_path, name=name, seed=seed, train={"steps": 2})))
    said = CliRunner().invoke(main, ["compare", f"{tmp_path}/one", f"{tmp_path}/two"])
    assert said.exit_code == 0, said.output
    assert "answers are not compared: one, two has no policy" in said.output
    assert "loss/judge" in said.output
    assert advice in said.output
    assert [bool(list(tmp_path.rglob(name))) for name in ("comparison.png", "evaluation.json")] == [not advice, True]
    drawn = CliRunner().invoke(main, ["monitor", str(tmp_path)])
    assert (drawn.exit_code, advice in drawn.output) == (2 if advice else 0, True)


def test_names_are_as_short_as_they_can_be(runs: list[Path], tmp_path: Path) -> None:
    assert list(named([Run(folder) for folder in runs])) == ["slow", "fast"]
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "slow").symlink_to(runs[0])
    with pytest.raises(ValueError, match="each once"):
        named([Run(tmp_path / "a" / "slow"), Run(tmp_path / "b" / "slow")])
    for parent in ("c", "d"):
        shutil.copytree(runs[0], tmp_path / parent / "slow")
    assert list(named([Run(tmp_path / parent / "slow") for parent in ("c", "d")])) == ["c/slow", "d/slow"]
    for words, told in (([runs[0]], "two or more runs"), ([runs[0], tmp_path], "is not a run with a finished step")):
        done = CliRunner().invoke(main, ["compare", *map(str, words)])
        assert (done.exit_code, told in done.output) == (2, True), done.output


def test_paths_of_a_run_are_those_from_where_it_was_started(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared from another folder, after a run was moved by itself, and after both were moved with their data."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    monkeypatch.chdir(there)
    recipe = make_recipe("sft", there)
    Path("rows").mkdir()
    shutil.copy(recipe["data"]["train"], "rows/train.jsonl")
    for name in ("one", "two"):
        run(
            load_settings(
                recipe, ["output=runs", f"name={name}", "data.train=rows/train.jsonl", "data.validation=null"]
            )
        )

    def prompts(*folders: Path) -> Any:
        return settings_of({str(folder): Run(folder) for folder in folders}, []).prompts

    monkeypatch.chdir(here)
    assert prompts(there / "runs/one", there / "runs/two") == [str(there / "rows/train.jsonl")]
    assert compare([str(there / "runs/one"), str(there / "runs/two")], ["limit=2", "sampling.max_tokens=4"]).answers
    (there / "runs/two").rename(here / "lone")
    assert prompts(here / "lone") == [str(there / "rows/train.jsonl")]
    there.rename(tmp_path / "moved")
    assert prompts(tmp_path / "moved/runs/one") == [str(tmp_path / "moved/rows/train.jsonl")]
    assert prompts(here / "lone") == ["rows/train.jsonl"]  # nowhere now
