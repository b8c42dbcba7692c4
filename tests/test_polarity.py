import random
from pathlib import Path

import pytest
from polarity import Gold, Sentence, gold_log_odds, gold_probability, load_gold, train_gold

GOOD = "moving funny warm clever lovely bright".split()
BAD = "dull flat tedious clumsy stale tired".split()
STARTS = "the film is|this is a|it seems|the cast looks|a story that is|what a".split("|")


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    """600 of them, whose words tell their side."""
    rng = random.Random(0)
    return [
        Sentence(
            f"{rng.choice(STARTS)} {rng.choice(words)} caf\u00e9 number {index} with {rng.choice(words)} scenes .", side
        )
        for index in range(300)
        for side, words in ((True, GOOD), (False, BAD))
    ]


def test_gold_by_hand() -> None:
    gold = Gold({"good": (1.0, 2.0), "not": (2.0, -1.0), "not good": (2.0, -3.0)}, 0.5)
    # TF-IDF (good 1, not 2, not good 2) has length 3: 0.5 + (1 * 2 - 2 * 1 - 2 * 3) / 3
    assert gold.log_odds("Not good !") == pytest.approx(0.5 - 2)
    assert gold.log_odds("unknown words") == 0.5
    assert Gold({}, 0.0).probability("anything") == 0.5


def test_gold_equals_scikit_learn_and_survives_the_disk(sentences: list[Sentence], tmp_path: Path) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    seen, unseen = sentences[:300], [s.text for s in sentences[300:350]]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2)
    model = LogisticRegression(C=10.0, tol=1e-6, max_iter=1000)
    model.fit(vectorizer.fit_transform([s.text for s in seen]), [s.positive for s in seen])
    train_gold(seen).save(tmp_path)
    gold = load_gold(tmp_path)
    theirs = model.decision_function(vectorizer.transform(unseen))
    assert [gold.log_odds(text) for text in unseen] == pytest.approx(list(theirs))


def test_gold_as_a_reward(sentences: list[Sentence], tmp_path: Path) -> None:
    gold = train_gold(sentences[:300])
    assert gold.accuracy(sentences[300:]) > 0.95  # the made-up words are easy
    gold.save(tmp_path)
    prompt, folder = "the film is", str(tmp_path)
    good, bad = (gold_probability(prompt, text, folder=folder) for text in (" moving .", " dull ."))
    assert good > 0.6 > 0.4 > bad
    assert gold_log_odds(prompt, " moving .", folder=folder) > 0 > gold_log_odds(prompt, " dull .", folder=folder)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train_gold\(sentences\)\.save"):
        load_gold(tmp_path)


@pytest.mark.slow
def test_real_sentences(shared_file) -> None:
    lines = {
        Sentence(line.strip(), side)
        for side, ending in ((True, "pos"), (False, "neg"))
        for line in shared_file(f"rt-polarity.{ending}").read_text(encoding="latin-1").split("\n")
    }
    shuffled = sorted(lines, key=lambda sentence: sentence.text)
    random.Random(0).shuffle(shuffled)
    half = len(shuffled) // 2
    assert train_gold(shuffled[:half]).accuracy(shuffled[half:]) > 0.74
