"""The demo's task on real text: film-review sentences with their polarity (Pang and Lee, 2005), one a line.

    rt-polarity.pos, rt-polarity.neg -> shuffled by a seed, cut in halves
        half A -> the gold classifier: TF-IDF of one and two words, logistic regression. Nothing else sees this half.
        half B -> 80 % training, 10 % validation, 10 % test, by sentence: sft, preferences, prompts, tokenizer.
                  The gold classifier never sees a sentence of B; its accuracy on B measures it.

A preference pair is a positive and a negative sentence that begin with the same words: the prompt is that beginning
(three shared words, else two, else one), and the chosen answer is the rest of the positive one. The labels are
people's, not the classifier's, so the judge and the gold reward share neither texts nor labels. The classifier reads
words, not sense: read completions too, since it may like nonsense.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from plaudit.data.byte_pairs import train_tokenizer
from plaudit.data.write import TaskFiles, write_task
from plaudit.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PolaritySize:
    """Which sentences of half B are used, and how."""

    shortest: int = 8
    longest: int = 32
    """Sentences of half B with fewer or more words (split at spaces) are left out."""
    pairs_per_sentence: int = 3
    """Most pairs of one sentence, each with another partner."""
    vocabulary: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PolarityFiles(TaskFiles):
    """The written files, and the accuracy of the gold classifier."""

    gold: Path
    """Folder for `load_gold`."""
    gold_accuracy: float
    """The gold classifier's accuracy on half B, which it never saw."""


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    positive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    gold: tuple[Sentence, ...]
    """Half A."""
    train: tuple[Sentence, ...]
    validation: tuple[Sentence, ...]
    test: tuple[Sentence, ...]

    @property
    def unseen(self) -> tuple[Sentence, ...]:
        """Half B."""
        return self.train + self.validation + self.test


@dataclass(frozen=True, slots=True)
class Gold:
    """The gold classifier: terms -> (inverse document frequency, coefficient), and the intercept."""

    terms: Mapping[str, tuple[float, float]]
    intercept: float

    def log_odds(self, text: str) -> float:
        """log P(positive) / P(negative): the intercept + coefficients . TF-IDF of unit length."""
        words = re.findall(r"\b\w\w+\b", text.lower())
        counts = Counter(words + [f"{a} {b}" for a, b in pairwise(words)])
        known = [
            (count * self.terms[term][0], self.terms[term][1]) for term, count in counts.items() if term in self.terms
        ]
        length = math.sqrt(sum(weight * weight for weight, _ in known))
        return self.intercept + sum(weight * coefficient for weight, coefficient in known) / (length or 1.0)

    def probability(self, text: str) -> float:
        """P(positive)."""
        return 0.5 * (1 + math.tanh(self.log_odds(text) / 2))

    def accuracy(self, sentences: Sequence[Sentence]) -> float:
        return sum((self.log_odds(s.text) > 0) == s.positive for s in sentences) / len(sentences)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"intercept": self.intercept, "terms": {term: list(pair) for term, pair in self.terms.items()}}
        (folder / "gold.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def make_polarity(source: Path, folder: Path, *, seed: int = 0, size: PolaritySize | None = None) -> PolarityFiles:
    """Write all files of the pipeline and the gold classifier into `folder`; `source` holds the `rt-polarity` pair."""
    size = size or PolaritySize()
    halves = split(read_sentences(source), seed=seed)
    gold = train_gold(halves.gold)
    gold.save(folder / "gold")
    rng = random.Random(seed)
    train, validation, test = (_usable(part, size) for part in (halves.train, halves.validation, halves.test))
    sft = [_continuation(sentence, rng.randint(1, 4)) for sentence in train]
    prompts = _beginnings(train, rng, apart_from=frozenset())
    pairs = preference_pairs(train, rng, uses=size.pairs_per_sentence)
    sft_validation = [_continuation(sentence, rng.randint(1, 4)) for sentence in validation]
    pairs_validation = preference_pairs(validation, rng, uses=size.pairs_per_sentence)
    prompts_test = _beginnings(test, rng, apart_from=frozenset(prompts))
    files = PolarityFiles(
        **write_task(
            folder,
            sft=(sft, sft_validation),
            preferences=(pairs, pairs_validation),
            prompts=([{"prompt": text} for text in prompts], [{"prompt": text} for text in prompts_test]),
        ),
        gold=folder / "gold",
        gold_accuracy=gold.accuracy(halves.unseen),
    )
    train_tokenizer((sentence.text for sentence in train), files.tokenizer, vocabulary=size.vocabulary)
    return files


def read_sentences(source: Path) -> list[Sentence]:
    """Read every sentence once, in the order of the files."""
    found: dict[str, bool] = {}
    for ending, positive in (("pos", True), ("neg", False)):
        path = source / f"rt-polarity.{ending}"
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no {path}. Give the folder that holds rt-polarity.pos and rt-polarity.neg."
            )
        for line in path.read_text(encoding="latin-1").split("\n"):
            text = " ".join(line.split())
            if text:
                found.setdefault(text, positive)
    return [Sentence(text, positive) for text, positive in found.items()]


def split(sentences: Sequence[Sentence], *, seed: int) -> Halves:
    """Half A and the three parts of half B, which share no sentence."""
    shuffled = list(sentences)
    random.Random(seed).shuffle(shuffled)
    half, tenth = len(shuffled) // 2, len(shuffled) // 20
    return Halves(
        gold=tuple(shuffled[:half]),
        train=tuple(shuffled[half : -2 * tenth]),
        validation=tuple(shuffled[-2 * tenth : -tenth]),
        test=tuple(shuffled[-tenth:]),
    )


def train_gold(sentences: Sequence[Sentence]) -> Gold:
    """Fit the gold classifier. Needs scikit-learn; using it afterwards does not."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError("The gold classifier is trained with scikit-learn: pip install scikit-learn.") from error
    # min_df and C: the best of a small grid by cross-validation inside half A
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2)
    features = vectorizer.fit_transform([sentence.text for sentence in sentences])
    model = LogisticRegression(C=10.0, max_iter=1000).fit(features, [sentence.positive for sentence in sentences])
    columns = zip(vectorizer.get_feature_names_out(), vectorizer.idf_, model.coef_[0], strict=True)
    terms = {str(term): (float(idf), float(coefficient)) for term, idf, coefficient in columns}
    return Gold(terms, float(model.intercept_[0]))


def load_gold(folder: Path | str) -> Gold:
    path = Path(folder) / "gold.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no gold classifier {path}. `make_polarity` writes one into its folder's gold/."
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    return Gold(
        {term: (idf, coefficient) for term, (idf, coefficient) in content["terms"].items()}, content["intercept"]
    )


_loaded = lru_cache(maxsize=4)(load_gold)


def gold_probability(prompt: Prompt, completion: str, *, folder: str) -> float:
    """Reward: P(positive) of prompt and completion together, by the gold classifier in `folder`."""
    return _loaded(folder).probability(prompt.text + completion)


def gold_log_odds(prompt: Prompt, completion: str, *, folder: str) -> float:
    """Reward: log-odds of positive of prompt and completion together, by the gold classifier in `folder`."""
    return _loaded(folder).log_odds(prompt.text + completion)


def preference_pairs(sentences: Sequence[Sentence], rng: random.Random, *, uses: int) -> list[dict[str, str]]:
    """Positive against negative sentences with the same beginning, the longest shared beginnings first.

    Within a beginning the two sides are shuffled and paired round by round, each round shifted by one; no sentence
    stands in more than `uses` pairs and no two sentences meet twice.
    """
    used: Counter[str] = Counter()
    met: set[tuple[str, str]] = set()
    pairs: list[dict[str, str]] = []
    for count in (3, 2, 1):
        sides: dict[str, tuple[list[Sentence], list[Sentence]]] = defaultdict(lambda: ([], []))
        for sentence in sentences:
            if used[sentence.text] < uses:
                sides[_beginning(sentence, count)][sentence.positive].append(sentence)
        for beginning, (negative, positive) in sides.items():
            if not negative or not _has_letters(beginning):
                continue
            rng.shuffle(negative)
            rng.shuffle(positive)
            for shift in range(min(uses, len(negative))):
                for index, good in enumerate(positive):
                    bad = negative[(index + shift) % len(negative)]
                    if max(used[good.text], used[bad.text]) >= uses or (good.text, bad.text) in met:
                        continue
                    used.update((good.text, bad.text))
                    met.add((good.text, bad.text))
                    chosen, rejected = good.text[len(beginning) :], bad.text[len(beginning) :]
                    pairs.append({"prompt": beginning, "chosen": chosen, "rejected": rejected})
    rng.shuffle(pairs)
    return pairs


def _usable(sentences: Sequence[Sentence], size: PolaritySize) -> list[Sentence]:
    return [sentence for sentence in sentences if size.shortest <= len(sentence.text.split()) <= size.longest]


def _beginning(sentence: Sentence, count: int) -> str:
    return " ".join(sentence.text.split()[:count])


def _continuation(sentence: Sentence, count: int) -> dict[str, str]:
    beginning = _beginning(sentence, count)
    return {"prompt": beginning, "completion": sentence.text[len(beginning) :]}


def _beginnings(sentences: Sequence[Sentence], rng: random.Random, *, apart_from: frozenset[str]) -> list[str]:
    """The first two to four words of each sentence, each beginning once."""
    drawn = dict.fromkeys(_beginning(sentence, rng.randint(2, 4)) for sentence in sentences)
    return [text for text in drawn if text not in apart_from and _has_letters(text)]


def _has_letters(text: str) -> bool:
    return any(character.isalpha() for character in text)
