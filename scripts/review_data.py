"""Controlled sentiment on film reviews that people wrote (Maas et al. 2011), as in the DPO paper, section 6.

    imdb-test                   -> passages -> the gold classifier (polarity.py), which nothing else sees
    imdb-train, imdb-unlabelled -> passages -> rows to imitate, prompts, others to choose settings by
    answers to each prompt      -> the best and the worst by gold -> the better one, drawn with noise -> preferences
                                                                  -> the better one                   -> exact

A passage is a run of sentences of 8 to 18 words, a prompt its first two to five words.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from polarity import Gold, Sentence, train_gold

from plaudit.data.write import write_rows

SHORTEST, LONGEST = 8, 18
NOISE = 3.0
"""P(a before b) = sigma((gold log-odds of a - of b) / NOISE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewsSize:
    """How many rows of each kind are made."""

    imitated: int = 3_000
    """Passages to imitate."""
    labelled: int = 1_000
    """Prompts whose answers are labelled and that training answers."""
    held_out: int = 96
    """Rows to measure by, of each kind."""


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
    parts = (size.imitated, size.held_out, size.labelled + size.held_out, size.held_out)
    rows = (_begun(text, rng) for text in texts[: sum(parts)])
    imitated, validation, rest, further = (list(islice(rows, part)) for part in parts)
    prompts = [{"prompt": text} for text in dict.fromkeys(row["prompt"] for row in rest)]
    tuning = [{"prompt": row["prompt"]} for row in further if {"prompt": row["prompt"]} not in prompts]
    write_rows(folder / "sft.jsonl", imitated)
    write_rows(folder / "sft_validation.jsonl", validation)
    write_rows(folder / "prompts_tuning.jsonl", tuning)
    write_rows(folder / "prompts_test.jsonl", prompts[: size.held_out])
    write_rows(folder / "prompts.jsonl", prompts[size.held_out :])
    return gold.accuracy(judged[:tenth])


def _begun(text: str, rng: random.Random) -> dict[str, str]:
    prompt = " ".join(text.split()[: rng.randint(2, 5)])
    return {"prompt": prompt, "completion": text[len(prompt) :]}


def extremes(answered: Iterable[tuple[str, list[str]]], gold: Gold) -> Iterator[dict[str, Any]]:
    """Yield each prompt with its best and worst answer by gold and how far apart they are in log-odds, if they differ.
    Empty answers are left out."""
    for prompt, answers in answered:
        worth = {answer: gold.log_odds(prompt + answer) for answer in answers if answer.strip()}
        if len(worth) > 1:
            best, worst = max(worth, key=worth.__getitem__), min(worth, key=worth.__getitem__)
            yield {"prompt": prompt, "best": best, "worst": worst, "margin": round(worth[best] - worth[worst], 4)}


def label_answers(
    folder: Path, answers: Iterable[dict[str, Any]], *, seed: int = 0, size: ReviewsSize | None = None
) -> None:
    """Write the `extremes` as pairs, labelled with noise and without, and those chosen with noise, to imitate."""
    held_out = (size or ReviewsSize()).held_out
    rng = random.Random(seed)
    pairs: dict[str, list[dict[str, str]]] = {"preferences": [], "exact": []}
    for row in answers:
        sure = 1 / (1 + math.exp(-row["margin"] / NOISE))
        for name, right in (("preferences", rng.random() < sure), ("exact", True)):
            chosen, rejected = (row["best"], row["worst"]) if right else (row["worst"], row["best"])
            pairs[name].append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    for name, rows in pairs.items():
        write_rows(folder / f"{name}_validation.jsonl", rows[:held_out])
        write_rows(folder / f"{name}.jsonl", rows[held_out:])
    preferred = ({"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs["preferences"][held_out:])
    write_rows(folder / "preferred.jsonl", preferred)
