"""Controlled sentiment on film reviews that people wrote (Maas et al. 2011), as in the DPO paper, section 6.

    imdb-test                   -> passages -> the gold classifier (polarity.py), which nothing else sees
    imdb-train, imdb-unlabelled -> passages -> tokenizer, rows to imitate, prompts
    two answers to each prompt  -> the better one, drawn by gold with noise -> preferences, preferred

A passage is a run of sentences of 20 to 45 words, a prompt its first two to eight words.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polarity import Gold, Sentence, train_gold

from plaudit.data.byte_pairs import train_tokenizer
from plaudit.data.write import write_rows

SHORTEST, LONGEST = 20, 45
NOISE = 1.0
"""P(a before b) = sigma((gold log-odds of a - of b) / NOISE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewsSize:
    """How many rows of each kind are made."""

    imitated: int = 240_000
    """Passages to imitate."""
    labelled: int = 8_000
    """Prompts whose answers are labelled and that training answers."""
    held_out: int = 256
    """Rows to measure by, of each kind."""
    vocabulary: int = 8192
    """Tokens of the tokenizer."""


def passages(path: Path) -> Iterator[tuple[str, bool | None]]:
    """Yield the passages of a file of reviews, with their labels: True is positive, False negative, None unlabelled."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            words: list[str] = []
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(row["text"].split())):
                words += sentence.split()
                if len(words) >= SHORTEST:
                    if len(words) <= LONGEST:
                        yield " ".join(words), {"pos": True, "neg": False}.get(row.get("label", ""))
                    words = []


def make_reviews(source: Path, folder: Path, *, seed: int = 0, size: ReviewsSize | None = None) -> float:
    """Write the task's files but the preferences into `folder`. Return the gold classifier's accuracy on a held-out
    tenth of imdb-test. `source` has the imdb files; raises FileNotFoundError if it lacks one. Needs scikit-learn."""
    names = [f"imdb-{name}.jsonl.gz" for name in ("test", "train", "unlabelled")]
    if missing := [name for name in names if not (source / name).is_file()]:
        raise FileNotFoundError(f"{source} has no {', '.join(missing)}: give the folder that holds {', '.join(names)}")
    size, rng = size or ReviewsSize(), random.Random(seed)
    judged = [Sentence(text, side) for text, side in passages(source / names[0]) if side is not None]
    rng.shuffle(judged)
    tenth = len(judged) // 10
    gold = train_gold(judged[tenth:])
    gold.save(folder / "gold")
    texts = [text for name in names[1:] for text, _ in passages(source / name)]
    rng.shuffle(texts)
    rows = [_begun(text, rng) for text in texts[: size.imitated + size.labelled + 2 * size.held_out]]
    imitated, validation = rows[: size.imitated], rows[size.imitated : size.imitated + size.held_out]
    rest = rows[size.imitated + size.held_out :]
    prompts = [{"prompt": text} for text in dict.fromkeys(row["prompt"] for row in rest)]
    write_rows(folder / "sft.jsonl", imitated)
    write_rows(folder / "sft_validation.jsonl", validation)
    write_rows(folder / "prompts_test.jsonl", prompts[: size.held_out])
    write_rows(folder / "prompts.jsonl", prompts[size.held_out :])
    whole = (row["prompt"] + row["completion"] for row in imitated)
    train_tokenizer(whole, folder / "tokenizer", vocabulary=size.vocabulary)
    return gold.accuracy(judged[:tenth])


def _begun(text: str, rng: random.Random) -> dict[str, str]:
    prompt = " ".join(text.split()[: rng.randint(2, 8)])
    return {"prompt": prompt, "completion": text[len(prompt) :]}


def label_answers(
    folder: Path,
    answered: Iterable[tuple[str, list[str]]],
    gold: Gold,
    *,
    seed: int = 0,
    size: ReviewsSize | None = None,
) -> None:
    """Write each prompt's two answers as a pair, if they differ and none is empty; and the chosen ones, to imitate."""
    held_out = (size or ReviewsSize()).held_out
    rng, rows = random.Random(seed), list[dict[str, str]]()
    for prompt, answers in answered:
        first, second = (gold.log_odds(prompt + answer) for answer in answers)
        better = rng.random() < 1 / (1 + math.exp(-(first - second) / NOISE))
        chosen, rejected = answers if better else answers[::-1]
        if chosen != rejected and chosen.strip() and rejected.strip():
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    pairs = rows[held_out:]
    write_rows(folder / "preferences_validation.jsonl", rows[:held_out])
    write_rows(folder / "preferences.jsonl", pairs)
    write_rows(folder / "preferred.jsonl", [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs])
