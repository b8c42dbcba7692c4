"""The study on real reviews: its runs can start, and all of it runs on made-up reviews with a tiny model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lab
import pytest
import reviews
from pictures import reviewed, tables
from review_data import ReviewsSize
from studies import STUDIES

from plaudit import load_settings
from plaudit.models.load import fresh_model, load_tokenizer, save_model
from plaudit.tasks.demo import DemoFiles


@pytest.fixture
def source(imdb: Path, demo: DemoFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, and a tiny model in the real one's place."""
    monkeypatch.setenv(reviews.SOURCE, str(imdb))
    monkeypatch.setattr("review_data.ReviewsSize", partial(ReviewsSize, imitated=40, labelled=100, held_out=8))
    sizes = {"hidden_size": 20, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 5}
    model = fresh_model({"model_type": "llama", "tie_word_embeddings": True, **sizes}, vocab_size=450, seed=0)
    save_model(model, tmp_path / "model", tokenizer=load_tokenizer(str(demo.tokenizer)))
    monkeypatch.setattr("reviews.smollm2.fetched", lambda: tmp_path / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("variant", [*reviews.REVIEWS, *reviews.TRIALS], ids=lambda v: v.name)
def test_the_runs_can_start(variant: lab.Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scripts").symlink_to(lab.ROOT / "scripts")
    reviews.FOLDER.mkdir(parents=True)
    (reviews.FOLDER / "model.gguf").symlink_to(tmp_path / "model")
    for name in ("sft", "preferences", "exact", "preferred", "prompts"):
        for split in ("", "_validation"):
            (reviews.FOLDER / f"{name}{split}.jsonl").touch()
    for recipe, name, overrides in (
        *reviews.TASK.first,
        *variant.needs,
        (variant.recipe, variant.name, variant.overrides),
    ):
        load_settings(str(lab.ROOT / "configs" / f"{recipe}.yaml"), list(overrides))
        Path("runs", name).mkdir(parents=True)


@pytest.mark.slow
@pytest.mark.usefixtures("source")
def test_all_of_it_runs_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(reviews, "DRAWN", (2, 4))
    few = ("train.steps=2", "train.batch_size=4")
    (sft, reward) = reviews.TASK.first
    first = ((sft[0], sft[1], few), (reward[0], reward[1], few))
    task = replace(reviews.TASK, first=first, max_tokens=8)
    monkeypatch.setattr(reviews, "TASK", task)
    short = {
        "reviews/ppo_gold": ("train.steps=1", "rollout.prompts_per_step=2", "rollout.max_tokens=8"),
        "reviews/dpo": few,
    }
    chosen = tuple(
        replace(variant, task=task, overrides=(*variant.overrides, *short[variant.recipe]))
        for variant in reviews.REVIEWS
        if variant.name in ("ppo_gold", "dpo_exact")
    )
    monkeypatch.setattr(reviews, "REVIEWS", chosen)
    trial = reviews.TRIALS[0]
    trial = replace(trial, task=replace(task, prompts=trial.task.prompts), overrides=(*trial.overrides, *few))
    monkeypatch.setattr(reviews, "TRIALS", (trial,))
    place = tmp_path / "lab"
    for variant in chosen:  # in this process, which has the small sizes
        variant.measured(place, lab.SEEDS[0])
    trial.measured(place, reviews.TUNING_SEED)
    reviews.measured(place, lab.SEEDS[:1], jobs=1)
    found = reviews.found(place, lab.SEEDS[:1])
    assert found.keys() == {"ppo_gold", "dpo_exact", trial.name, "best_of_n_gold", "best_of_n_judge"}
    assert found[trial.name].keys() == {str(reviews.TUNING_SEED)}, "no seed that reports"
    seed, width = str(lab.SEEDS[0]), len(reviews.TASK.figures)
    assert all(len(point) == width for name in ("ppo_gold", "dpo_exact") for point in found[name][seed])
    (_, _, two), (_, _, four) = found["best_of_n_gold"][seed]
    assert 0 < two <= four < 1, "more answers, a better best"
    shown = reviews.side_by_side(place)
    assert list(shown) == ["prompt", "SFT policy", "PPO, gold reward", "DPO, exact labels"]
    none: Any = {study: {} for study in STUDIES}
    page = "\n".join(tables(none | {"reviews": found}, shown))
    assert "| PPO, gold reward | 1 |" in page and "| dpo at 5.0e-4 | 1 |" in page
    reviewed(found, tmp_path / "reviews.png")
    assert (tmp_path / "reviews.png").stat().st_size > 10_000
