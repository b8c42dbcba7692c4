"""The study on real reviews: its runs can start, and all of it runs on made-up reviews with a tiny model."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import lab
import pytest
import reviews
from pictures import reviewed, reviewed_tables

from plaudit import load_settings

WORDS = {"pos": "great lovely warm clever bright".split(), "neg": "dull awful cold stupid grey".split()}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up reviews, whose words tell their label."""
    rng = random.Random(0)
    for name, labels in (("train", ("pos", "neg")), ("test", ("pos", "neg")), ("unlabelled", (None,))):
        with gzip.open(tmp_path / f"imdb-{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            for number in range(60):
                label = labels[number % len(labels)]
                words = WORDS[label] if label else [*WORDS["pos"], *WORDS["neg"]]
                sentences = [f"The {rng.choice(words)} film was {rng.choice(words)} and {rng.choice(words)}."] * 6
                file.write(json.dumps({"id": f"{name}/{number}", "text": " ".join(sentences), "label": label}) + "\n")
    monkeypatch.setenv(reviews.SOURCE, str(tmp_path))
    return tmp_path


def test_passages_are_whole_sentences_of_a_review_with_its_label(source: Path) -> None:
    found = list(reviews.passages("test"))
    assert len(found) == 120, "two passages of three sentences each"
    assert all(text.endswith(".") and 20 <= len(text.split()) <= 45 for text, _ in found)
    assert {label for _, label in found} == {True, False}
    assert {label for _, label in reviews.passages("unlabelled")} == {None}


@pytest.mark.parametrize("variant", reviews.REVIEWS, ids=lambda v: v.name)
def test_the_runs_can_start(variant: lab.Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (reviews.FOLDER / "tokenizer").mkdir(parents=True)
    for name in ("sft", "preferences", "preferred", "prompts"):
        for split in ("", "_validation"):
            (reviews.FOLDER / f"{name}{split}.jsonl").touch()
    for recipe, name, overrides in (*reviews.TASK.first, (variant.recipe, variant.name, variant.overrides)):
        load_settings(str(lab.ROOT / "configs" / f"{recipe}.yaml"), list(overrides))
        Path("runs", name).mkdir(parents=True)


@pytest.mark.slow
@pytest.mark.usefixtures("source")
def test_all_of_it_runs_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(reviews, "SEEN", 40)
    monkeypatch.setattr(reviews, "HELD_OUT", 8)
    monkeypatch.setattr(reviews, "VOCABULARY", 300)
    monkeypatch.setattr(reviews, "DRAWN", (2, 4))
    monkeypatch.setattr(reviews, "TOKENS", 8)
    tiny = tuple(f"model.config.{key}" for key in ("hidden_size=16", "intermediate_size=16", "num_hidden_layers=1"))
    few = ("train.steps=2", "train.batch_size=4")
    (sft, reward) = reviews.TASK.first
    first = ((sft[0], sft[1], (*tiny, *few)), (reward[0], reward[1], few))
    task = replace(reviews.TASK, first=first, max_tokens=8)
    short = {
        "reviews/ppo_gold": ("train.steps=1", "rollout.prompts_per_step=2", "rollout.max_tokens=8"),
        "reviews/dpo": few,
    }
    chosen = tuple(
        replace(variant, task=task, overrides=(*variant.overrides, *short[variant.recipe]))
        for variant in reviews.REVIEWS
        if variant.name in ("ppo_gold_0.1", "dpo_0.3")
    )
    monkeypatch.setattr(reviews, "REVIEWS", chosen)
    place = tmp_path / "lab"
    for variant in chosen:  # in this process, which has the small sizes
        variant.measured(place, 0)
    reviews.measured(place, [0], jobs=1)
    found = reviews.found(place, [0])
    assert found.keys() == {"ppo_gold_0.1", "dpo_0.3", "best_of_n_gold", "best_of_n_judge"}
    width = len(reviews.TASK.figures)
    assert all(len(point) == width for name in ("ppo_gold_0.1", "dpo_0.3") for point in found[name]["0"])
    (_, _, two), (_, _, four) = found["best_of_n_gold"]["0"]
    assert 0 < two <= four < 1, "more answers, a better best"
    shown = reviews.side_by_side(place)
    assert list(shown) == ["prompt", "PPO, gold reward", "DPO"]
    page = "\n".join(reviewed_tables(found, shown))
    assert "| PPO, gold reward, kl_coefficient=0.1 | 1 |" in page
    reviewed(found, tmp_path / "reviews.png")
    assert (tmp_path / "reviews.png").stat().st_size > 10_000
