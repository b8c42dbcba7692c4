import gzip
import json
from pathlib import Path

import pytest
from polarity import Gold, load_gold
from review_data import ReviewsSize, extremes, label_answers, make_reviews, passages


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_passages_are_whole_sentences_of_a_review_with_its_label(imdb: Path) -> None:
    found = list(passages(imdb / "imdb-test.jsonl.gz"))
    assert len(found) == 180, "three passages of two sentences each"
    assert all(text.endswith(".") and 8 <= len(text.split()) <= 18 for text, _ in found)
    assert {label for _, label in found} == {True, False}
    assert {label for _, label in passages(imdb / "imdb-unlabelled.jsonl.gz")} == {None}


def test_passages_by_hand(tmp_path: Path) -> None:
    """Sentences of 5, 4, 19 and 11 words: the first two together, none, one."""
    sentences = [" ".join([f"w{count}"] * (count - 1) + ["end."]) for count in (5, 4, 19, 11)]
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "  ".join(sentences), "label": "neg"}))
    assert list(passages(tmp_path / "some.jsonl.gz")) == [
        (f"{sentences[0]} {sentences[1]}", False),
        (sentences[3], False),
    ]


def test_files_share_no_passage_with_the_gold_classifier(imdb: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    size = ReviewsSize(imitated=40, labelled=20, held_out=8)
    assert make_reviews(imdb, tmp_path, seed=1, size=size) > 0.9, "the made-up words are easy"
    gold = load_gold(tmp_path / "gold")
    assert gold.log_odds("great lovely") > 0 > gold.log_odds("dull awful")
    imitated, validation = rows(tmp_path / "sft.jsonl"), rows(tmp_path / "sft_validation.jsonl")
    assert (len(imitated), len(validation)) == (40, 8)
    seen = {text for name in ("train", "unlabelled") for text, _ in passages(imdb / f"imdb-{name}.jsonl.gz")}
    assert {row["prompt"] + row["completion"] for row in imitated + validation} <= seen
    ends = ("", "_test", "_tuning")
    prompts, held_out, tuning = ({row["prompt"] for row in rows(tmp_path / f"prompts{end}.jsonl")} for end in ends)
    assert prompts and held_out and tuning and not prompts & held_out and not tuning & (prompts | held_out)
    assert all(2 <= len(text.split()) <= 5 for text in prompts | held_out | tuning)


def test_labels_follow_gold_with_noise(tmp_path: Path) -> None:
    """Log-odds of 2 and 0 apart from the intercept: the first is preferred with sigma(2 / 3) = 0.661."""
    gold = Gold({"good": (1.0, 2.0)}, -1.0)
    answered = [(f"prompt {number}", [" good", " else"]) for number in range(4000)]
    answered += [("same", [" x", " x"]), ("first is empty", ["", " good"]), ("second is empty", [" good", "\n"])]
    label_answers(tmp_path, extremes(answered, gold), seed=3, size=ReviewsSize(held_out=10))
    pairs = rows(tmp_path / "preferences.jsonl")
    assert len(pairs) == 3990 and len(rows(tmp_path / "preferences_validation.jsonl")) == 10
    share = sum(pair["chosen"] == " good" for pair in pairs) / len(pairs)
    assert share == pytest.approx(0.661, abs=0.03)  # four deviations
    preferred = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    assert rows(tmp_path / "preferred.jsonl") == preferred
    exact = rows(tmp_path / "exact.jsonl")
    assert len(exact) == 3990 and all(pair["chosen"] == " good" for pair in exact), "without noise"


def test_a_folder_without_the_files_is_refused(imdb: Path, tmp_path: Path) -> None:
    (imdb / "imdb-train.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"imdb-train\.jsonl\.gz.*imdb-test"):
        make_reviews(imdb, tmp_path)
