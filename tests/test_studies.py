"""The studies of docs/results.md: their runs can start, their arithmetic is right, and the page shows their files."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import gym
import pytest
from lab import FIGURES, FIRST, ROOT, SEEDS, Stage, Task, Variant, kept, measure, prepare, train
from pictures import PICTURES, gained, gym_tables
from results import KEPT, PAGE, read, shown_tables
from studies import METHODS, STUDIES, gao, interval, last, over_seeds

from plaudit import load_settings
from plaudit.monitor.sinks import read_jsonl
from plaudit.tasks.demo import DemoSize, make_demo

POINTS: Any = {
    "0": [[0, 0.0, 0.1, 0.0, 0.5, 20.0, 0.0], [20, 4.0, 0.5, 1.0, 0.8, 18.0, 0.0]],
    "1": [[0, 0.0, 0.3, 0.2, 0.5, 22.0, 0.0], [20, 6.0, 0.7, 1.4, 0.9, 20.0, 0.0]],
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder that has the files of a seed, empty ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "demo" / "tokenizer").mkdir(parents=True)
    for name in ("sft", "preferences", "prompts"):
        for split in ("", "_validation"):
            (tmp_path / "data" / "demo" / f"{name}{split}.jsonl").touch()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for study in STUDIES.values() for v in study], ids=lambda v: v.name)
def test_the_runs_of_a_study_can_start(variant: Variant, lab: None) -> None:
    for recipe, name, overrides in (*FIRST, *variant.needs, (variant.recipe, variant.name, variant.overrides)):
        load_settings(str(ROOT / "configs" / f"{recipe}.yaml"), list(overrides))
        Path("runs", name).mkdir(parents=True)


def test_a_variant_has_one_name_in_its_study() -> None:
    for study in STUDIES.values():
        assert len({variant.name for variant in study}) == len(study)


def test_a_variant_that_was_measured_is_not_run_again(tmp_path: Path) -> None:
    variant = Variant(name="old", recipe="rloo", overrides=("train.steps=3",))
    about = {"recipe": variant.about["recipe"], "overrides": ["train.steps=3"]}
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "old_7.json").write_text(json.dumps({"about": about, "points": [[3, 1.0]]}))
    assert variant.measured(tmp_path, 7) == [[3, 1.0]]


@pytest.mark.slow
def test_a_run_is_measured_beside_its_sft_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of a small model, and judges of few steps: a variant with a judge of its own, in another process."""
    folder = tmp_path / "seed3"
    make_demo(folder / "data" / "demo", seed=3, size=DemoSize(sft=300, pairs=60, prompts=20, prompts_test=12))
    monkeypatch.chdir(folder)
    shape = ("model.config.n_embd=16", "model.config.n_layer=1", "model.config.n_head=2")
    train("sft", "sft", 3, *shape, "train.steps=2")
    train("reward", "reward", 3, "train.steps=1")
    for name in ("sft", "reward"):
        Path("runs", name, "done").touch()
    judge: Stage = ("reward", "judge_other", ("train.steps=2",))
    few = (
        "rollout.prompts_per_step=8",
        "rollout.slots=4",
        "rollout.max_tokens=8",
        "rollout.max_lag=4",
        "train.steps=6",
    )
    variant = Variant(
        name="few", recipe="rloo", overrides=few, every=2, needs=(judge,), judge="judge_other", behind=True
    )
    measure([variant], tmp_path, [3], jobs=1)
    points = kept([variant], tmp_path, [3, 4])["few"]["3"]
    assert [point[0] for point in points] == [0, 2, 4, 6]
    assert points[0][1] == 0 and points[0][FIGURES.index("win")] == 0.5
    assert all(len(point) == len(FIGURES) and -1 <= point[FIGURES.index("gold")] <= 1 for point in points)
    assert not Path("runs", "few", "checkpoints").exists()
    *_, end = read_jsonl(Path("runs", "few", "metrics.jsonl"))
    assert end["lag/max"] == 4, "sampling ran ahead; without that, 2 at most"
    assert kept([replace(variant, overrides=few[:2])], tmp_path, [3]) == {}


def small(folder: Path, *, seed: int) -> None:
    make_demo(folder, seed=seed, size=DemoSize(sft=60, pairs=20, prompts=4, prompts_test=4))


@pytest.mark.slow
def test_seeds_may_share_files_and_the_sft_policy(tmp_path: Path) -> None:
    tiny = ("model.config.n_embd=16", "model.config.n_layer=1", "model.config.n_head=2", "train.steps=1")
    first: tuple[Stage, ...] = (("sft", "sft", tiny), ("reward", "reward", ("train.steps=1",)))
    task = Task(make=small, shared=True, first=first)
    before = tmp_path / "before"
    for _ in range(2):  # the second time finds all of it
        prepare(before, SEEDS[1], task=task)
    moved = before.rename(tmp_path / "moved")
    zero, one = (moved / f"seed{seed}" for seed in SEEDS[:2])
    assert (one / "runs" / "sft").samefile(zero / "runs" / "sft")
    assert not (one / "runs" / "reward").samefile(zero / "runs" / "reward"), "a judge of its own"
    same = [(seed / "data" / "demo" / "sft.jsonl").read_bytes() for seed in (zero, one)]
    assert same[0] == same[1]


def test_figures_over_seeds() -> None:
    assert over_seeds(POINTS, "gold") == pytest.approx([0.2, 0.6])
    assert last(POINTS, "kl") == [4.0, 6.0]
    assert gained(POINTS, "judge") == [(0.0, 0.0), (5.0, pytest.approx(1.1))]
    assert interval([0.5]) == "0.50"
    # The deviation of 1, 2, 3 is 1; 4.30 / sqrt(3) is 2.48.
    assert interval([1.0, 2.0, 3.0]) == "2.00 ± 2.48"


def test_the_form_of_gao_et_al_is_found_again() -> None:
    d = [0.5, 1.0, 2.0, 3.0, 4.0]
    alpha, beta, explained, line = gao([(0.0, 0.0), *((x * x, x * (0.9 - 0.4 * math.log(x))) for x in d)])
    assert (alpha, beta, explained) == (pytest.approx(0.9), pytest.approx(0.4), pytest.approx(1.0))
    # r is 0.589, 0.9, 1.245, 1.382, 1.382: of their variance 0.481 a line leaves 0.081.
    assert line == pytest.approx(0.832, abs=5e-4)


def test_the_page_shows_what_the_files_hold() -> None:
    found = {study: read(study) for study in STUDIES}
    page = PAGE.read_text(encoding="utf-8")
    assert shown_tables().rstrip() in page
    for study, variants in STUDIES.items():
        assert found[study].keys() <= {variant.name for variant in variants}
        runs = [points for own in found[study].values() for points in own.values()]
        assert all(len(point) == len(FIGURES) for points in runs for point in points)
        assert (KEPT / f"{study}.png").exists() == (bool(runs) and study in PICTURES)


def test_recipes_that_were_measured_reach_a_gold_of_0_55_on_seeds_of_no_tuning() -> None:
    """On the seeds that they were tuned on, ORPO and SimPO reached 0.6."""
    found = read("frontier")
    means = {recipe: fmean(last(found[recipe], "gold")) for recipe in METHODS if recipe in found}
    assert not {recipe for recipe, mean in means.items() if mean < 0.55}


def test_arms_of_the_gym_can_start_and_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With records as `scripts/gym.py` writes them; no model is loaded."""
    monkeypatch.chdir(tmp_path)
    fresh = {"model": {"config": {"model_type": "gpt2"}, "tokenizer": str(tmp_path)}}
    for name in ("warm.jsonl", "rest.jsonl"):
        Path(name).touch()
    monkeypatch.setattr(gym, "commonest", lambda task, seed: 0.25)
    figures = {"right": 0.5, "low": 0.4, "high": 0.6, "pass": 0.75, "length": 2.0, "unfinished": 0.25, "cpu": 90.0}
    for arm, seed in itertools.product(gym.ARMS, gym.SEEDS[:2]):
        if arm in gym.MADE_BY and find_spec("reasoning_gym") is not None:
            assert load_settings(gym.recipe(arm, seed) | fresh).seed == seed
        record = {"about": {}, "figures": figures | {"right": seed / 4}}
        (tmp_path / f"chain_sum_{arm}_{seed}.json").write_text(json.dumps(record))
    found = gym.found(tmp_path)
    shown = [*gym_tables(found)]
    means, often = "0.38 ± 1.59", "0.75 ± 0.00"  # 0.25 and 0.5: 12.7 times 0.125
    cells = f"2 | {means} | 0.25 (0.40 to 0.60), 0.50 (0.40 to 0.60) | {often} | 2.00 ± 0.00 | 25% | 1.5"
    assert f"| {gym.ARMS['grpo']} | {cells} |" in shown
    assert f"| always the commonest answer | 2 | 0.25 ± 0.00 |{'  |' * 5}" in shown
    PICTURES["gym"](found, tmp_path / "gym.png")
    assert (tmp_path / "gym.png").stat().st_size > 10_000
