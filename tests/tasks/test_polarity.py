import json
import random
from pathlib import Path

import pytest

from plaudit.tasks.polarity import (
    Gold,
    PolarityFiles,
    PolaritySize,
    Sentence,
    gold_log_odds,
    gold_probability,
    load_gold,
    make_polarity,
    preference_pairs,
    read_sentences,
    split,
    train_gold,
)
from plaudit.types import Prompt

GOOD = "moving funny warm clever lovely bright".split()
BAD = "dull flat tedious clumsy stale tired".split()
STARTS = "the film is|this is a|it seems|the cast looks|a story that is|what a".split("|")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the real one: 300 sentences a side, latin-1, some twice."""
    folder, rng = tmp_path_factory.mktemp("source"), random.Random(0)
    for ending, words in (("pos", GOOD), ("neg", BAD)):
        lines = [
            f"{rng.choice(STARTS)} {rng.choice(words)} caf\u00e9 number {index} with {rng.choice(words)} scenes . "
            for index in range(300)
        ]
        (folder / f"rt-polarity.{ending}").write_text("\n".join([*lines, lines[0]]) + "\n", encoding="latin-1")
    return folder


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> PolarityFiles:
    size = PolaritySize(vocabulary=500)
    return make_polarity(source, tmp_path_factory.mktemp("polarity"), seed=1, size=size)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_parts_are_disjoint_and_complete(source: Path) -> None:
    sentences = read_sentences(source)
    assert len(sentences) == 600  # each side's repeated sentence once
    halves = split(sentences, seed=1)
    parts = [{s.text for s in part} for part in (halves.gold, halves.train, halves.validation, halves.test)]
    assert [len(part) for part in parts] == [300, 240, 30, 30]
    assert set().union(*parts) == {s.text for s in sentences}
    assert split(sentences, seed=1) == halves != split(sentences, seed=2)


def test_nothing_of_the_gold_half_is_written(source: Path, made: PolarityFiles) -> None:
    halves = split(read_sentences(source), seed=1)
    seen_by_gold = {s.text for s in halves.gold}
    train = {s.text for s in halves.train}
    assert {row["prompt"] + row["completion"] for row in rows(made.sft)} <= train - seen_by_gold
    for pair in rows(made.preferences):
        assert {pair["prompt"] + pair["chosen"], pair["prompt"] + pair["rejected"]} <= train - seen_by_gold
    test = {row["prompt"] for row in rows(made.prompts_test)}
    assert not test & {row["prompt"] for row in rows(made.prompts)}


def test_pairs_follow_the_labels(source: Path, made: PolarityFiles) -> None:
    label = {s.text: s.positive for s in read_sentences(source)}
    pairs = rows(made.preferences)
    assert len(pairs) > 100
    uses: dict[str, int] = {}
    for pair in pairs:
        chosen, rejected = pair["prompt"] + pair["chosen"], pair["prompt"] + pair["rejected"]
        assert label[chosen]
        assert not label[rejected]
        for text in (chosen, rejected):
            uses[text] = uses.get(text, 0) + 1
    assert max(uses.values()) <= 3
    assert len({json.dumps(pair) for pair in pairs}) == len(pairs)


def test_pairs_by_hand() -> None:
    sentences = [
        Sentence("the film is a joy", True),
        Sentence("the film is a bore", False),
        Sentence("the film was fun", True),
        Sentence("the plot was thin", False),
        Sentence("nobody else begins so", True),
    ]
    pairs = preference_pairs(sentences, random.Random(0), uses=1)
    assert sorted(pairs, key=lambda pair: pair["prompt"]) == [
        {"prompt": "the", "chosen": " film was fun", "rejected": " plot was thin"},
        {"prompt": "the film is", "chosen": " a joy", "rejected": " a bore"},
    ]


def test_gold_by_hand() -> None:
    gold = Gold({"good": (1.0, 2.0), "not": (2.0, -1.0), "not good": (2.0, -3.0)}, 0.5)
    # TF-IDF (good 1, not 2, not good 2) has length 3: 0.5 + (1 * 2 - 2 * 1 - 2 * 3) / 3
    assert gold.log_odds("Not good !") == pytest.approx(0.5 - 2)
    assert gold.log_odds("unknown words") == 0.5
    assert Gold({}, 0.0).probability("anything") == 0.5


def test_gold_equals_scikit_learn_and_survives_the_disk(source: Path, tmp_path: Path) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    halves = split(read_sentences(source), seed=1)
    texts = [s.text for s in halves.gold]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2)
    model = LogisticRegression(C=10.0, max_iter=1000)
    model.fit(vectorizer.fit_transform(texts), [s.positive for s in halves.gold])
    train_gold(halves.gold).save(tmp_path)
    gold = load_gold(tmp_path)
    unseen = [s.text for s in halves.unseen[:50]]
    theirs = model.decision_function(vectorizer.transform(unseen))
    assert [gold.log_odds(text) for text in unseen] == pytest.approx(list(theirs))


def test_gold_as_a_reward(made: PolarityFiles) -> None:
    assert made.gold_accuracy > 0.95  # the made-up words are easy
    prompt = Prompt(id="x:1", text="the film is", tokens=())
    good, bad = (gold_probability(prompt, text, folder=str(made.gold)) for text in (" moving .", " dull ."))
    assert good > 0.6 > 0.4 > bad
    assert gold_log_odds(prompt, " moving .", folder=str(made.gold)) > 0


def test_missing_files_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="folder that holds"):
        read_sentences(tmp_path)
    with pytest.raises(FileNotFoundError, match="make_polarity"):
        load_gold(tmp_path)


@pytest.mark.slow
def test_the_real_sentences(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not (folder / "rt-polarity.pos").is_file():
        pytest.skip(f"the sentences are not at {folder}")
    sentences = read_sentences(folder)
    assert len(sentences) == 10_662
    files = make_polarity(folder, tmp_path, seed=0)
    assert files.gold_accuracy > 0.74
    assert len(rows(files.preferences)) > 2000
    assert len(rows(files.sft)) > 3000
