"""The demo task, controlled sentiment: film comments that need no download, with a gold reward that is known exactly.

    seed -> sft, preferences (noisy labels by gold), prompts, held-out prompts, tokenizer

A prompt is the beginning of a comment, without an opinion ("We saw The Paper Tower on Sunday . The acting"); the
completion is the rest. The language itself is in `grammar.py`.

The gold reward reads only the completion, and its join with the prompt's last word:

    gold = quality * (1 + sentiment) - 1          so the worst opinion and no text at all are both worth -1

    sentiment = tanh(2 * sum_i w_i v_i / max(sum_i w_i, 2))                                            in (-1, 1)
        i    every word of the lexicon, in order
        v_i  its strength x the degree word right before it, cut to [-1, 1]; x -0.6 if a negation stands before it in
             its clause (clauses end at `.` `!` `?` `,` `;` `and` `but` `although`); 0 if its base form occurred before
        w_i  1; in a sentence with `but`, 1/2 before it and 3/2 after it; after `although` 1/2, from the next comma 3/2
        The 2 in `max` makes a single opinion count half: one adjective is no comment.
    quality = fluency * finished * length * distinct                                                   in [0, 1]
        fluency   max(0, 1 - 3 * share of neighbouring words, the join with the prompt included, that never stand so in
                  the grammar), case and punctuation included
        finished  1 if the last character but spaces is `.`, else 1/2
        length    1 from 7 to 45 words, in proportion below, falling to 0 at 90 in a straight line above
        distinct  share of sentences that did not occur before
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from plaudit.data.byte_pairs import train_tokenizer
from plaudit.data.write import TaskFiles, write_task
from plaudit.tasks.grammar import DEGREES, NEGATIONS, grammar, possible_pairs
from plaudit.types import Prompt

SENTENCE_ENDS = frozenset(".!?")
CLAUSE_ENDS = frozenset({",", ";", "and", "but", "although"})
SHORTEST, LONGEST = 7, 45
"""Fewer or more words lower a completion's quality. Completions of the data have 7 to 40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """Sizes of the files. Every prompt is in one file only; about half of the pairs' prompts have several pairs."""

    sft: int = 16000
    sft_validation: int = 400
    pairs: int = 12000
    pairs_validation: int = 400
    prompts: int = 4000
    prompts_test: int = 256
    vocabulary: int = 1280


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFiles(TaskFiles):
    """The written files, and the noise of the preference labels."""

    label_agreement: float
    """Share of training pairs whose chosen answer is strictly better by gold, which is gold's own accuracy on them."""
    sft_gold_mean: float
    sft_gold_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers as labelled; `agrees` is true if gold orders them in the same way."""

    prompt: str
    chosen: str
    rejected: str
    agrees: bool


def make_demo(folder: Path, *, seed: int = 0, size: DemoSize | None = None) -> DemoFiles:
    """Write the whole task into `folder`: the same seed and size give the same bytes. Takes about three seconds."""
    size = size or DemoSize()
    comments = Comments(random.Random(seed))
    prompts_test = [{"prompt": comments.prompt()[0]} for _ in range(size.prompts_test)]
    prompts = [{"prompt": comments.prompt()[0]} for _ in range(size.prompts)]
    sft = [comments.example() for _ in range(size.sft)]
    sft_validation = [comments.example() for _ in range(size.sft_validation)]
    pairs = comments.pairs(size.pairs)
    pairs_validation = comments.pairs(size.pairs_validation)

    golds = [gold(row["prompt"], row["completion"]) for row in sft]
    mean = sum(golds) / len(golds)
    files = DemoFiles(
        **write_task(
            folder,
            sft=(sft, sft_validation),
            preferences=(map(_pair_row, pairs), map(_pair_row, pairs_validation)),
            prompts=(prompts, prompts_test),
        ),
        label_agreement=sum(pair.agrees for pair in pairs) / len(pairs),
        sft_gold_mean=mean,
        sft_gold_std=math.sqrt(sum((g - mean) ** 2 for g in golds) / len(golds)),
    )
    train_tokenizer((row["prompt"] + row["completion"] for row in sft), files.tokenizer, vocabulary=size.vocabulary)
    about = {"seed": seed, "size": asdict(size), "label_agreement": files.label_agreement, "sft_gold_mean": mean}
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return files


class Comments:
    """A stream of distinct prompts, and of completions for them."""

    temperature = 0.15
    """Noise of the labels: P(a before b) = sigmoid((gold(a) - gold(b)) / temperature)."""
    flips = 0.05
    """Share of labels that are then flipped."""
    spoiled = 0.1
    """Share of answers in pairs that are cut off, repeat themselves or are in disorder, so that a judge has seen such
    answers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.seen: set[str] = set()

    def prompt(self) -> tuple[str, str]:
        """Return a new prompt, and the number (`one` or `many`) that its completion must agree with."""
        while True:
            number = "one" if self.rng.random() < 0.65 else "many"
            text = " ".join(grammar().write(f"prompt.{number}", self.rng, used=set()))
            if text not in self.seen:
                self.seen.add(text)
                return text, number

    def completion(self, number: str, *, positive: float | None = None) -> str:
        """Return a completion by the grammar, of 7 to 40 words. Each sentence has an opinion with probability 4/5, and
        an opinion is good with probability `positive`. By default the comment is mostly for, mostly against or divided,
        at random, so that gold is about 0 on average and widely spread."""
        rng = self.rng
        chance = rng.choice((0.04, 0.04, 0.5, 0.96, 0.96)) if positive is None else positive
        while True:
            used: set[str] = set()
            words: list[str] = []
            for index in range(rng.choice((1, 2, 2, 3, 3, 4))):
                tone = "0" if rng.random() < 0.2 else "+" if rng.random() < chance else "-"
                rule = f"sentence{tone}" if index else f"start.{number}{tone}"
                words += grammar().write(rule, rng, used=used)
            text = " " + " ".join(words)
            if SHORTEST <= len(words) <= 40 and _distinct_sentences(words) == 1:
                return text

    def example(self) -> dict[str, str]:
        text, number = self.prompt()
        return {"prompt": text, "completion": self.completion(number)}

    def pairs(self, count: int) -> list[Pair]:
        found: list[Pair] = []
        while len(found) < count:
            text, number = self.prompt()
            for _ in range(min(self.rng.choice((1, 1, 2, 3)), count - len(found))):
                found.append(self._pair(text, self._answer(number), self._answer(number)))
        return found

    def _answer(self, number: str) -> str:
        text = self.completion(number)
        return spoil(text, self.rng) if self.rng.random() < self.spoiled else text

    def _pair(self, prompt: str, a: str, b: str) -> Pair:
        difference = gold(prompt, a) - gold(prompt, b)
        first = self.rng.random() < 1 / (1 + math.exp(-difference / self.temperature))
        if self.rng.random() < self.flips:
            first = not first
        chosen, rejected = (a, b) if first else (b, a)
        return Pair(prompt=prompt, chosen=chosen, rejected=rejected, agrees=(difference if first else -difference) > 0)


def spoil(text: str, rng: random.Random) -> str:
    """Damage a completion the way models do: cut it off, repeat its end, or put some of its words out of order."""
    words = text.split()
    damage = rng.choice(("cut", "repeat", "disorder"))
    if damage == "cut":
        words = words[: rng.randrange(3, len(words))]
    elif damage == "repeat":
        words += words[-rng.randrange(3, 8) :] * rng.choice((1, 2, 3))
    else:
        for _ in range(rng.randrange(1, 5)):
            i, j = rng.randrange(len(words)), rng.randrange(len(words))
            words[i], words[j] = words[j], words[i]
    return " " + " ".join(words)


def gold(prompt: str, completion: str) -> float:
    """Return the completion's value in [-1, 1), by the formulas at the head of this file."""
    words = split_words(completion)
    if not words:
        return -1.0
    before = split_words(prompt)[-1:]
    finished = 1.0 if words[-1] == "." else 0.5
    length = min(1.0, len(words) / SHORTEST, max(0.0, 2 - len(words) / LONGEST))
    quality = _fluency(before + words) * finished * length * _distinct_sentences(words)
    return quality * (1 + sentiment(words)) - 1


def gold_reward(prompt: Prompt, text: str) -> float:
    """`gold` as a reward function: `plaudit.tasks.demo:gold_reward`."""
    return gold(prompt.text, text)


def split_words(text: str) -> list[str]:
    """Split a text into words and single punctuation marks."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_", text)


def sentiment(words: Sequence[str]) -> float:
    """Return the opinions' weighted mean, squashed by tanh into (-1, 1), by the formula at the head of this file."""
    values: list[float] = []
    weights: list[float] = []
    met: set[str] = set()
    sentence_start, weight, degree, negated, conceding = 0, 1.0, 1.0, False, False
    lexicon = grammar().lexicon
    for word in map(str.lower, words):
        if word in SENTENCE_ENDS:
            sentence_start, weight, negated, conceding = len(values), 1.0, False, False
        elif word in CLAUSE_ENDS:
            negated = False
            if word == "but":
                weights[sentence_start:] = [0.5] * (len(weights) - sentence_start)
            if word == "but" or (word == "," and conceding):
                weight, conceding = 1.5, False
            elif word == "although":
                weight, conceding = 0.5, True
        elif word in NEGATIONS:
            negated = True
        elif word in lexicon:
            strength, base = lexicon[word]
            value = max(-1.0, min(1.0, strength * degree)) * (-0.6 if negated else 1.0)
            values.append(0.0 if base in met else value)
            weights.append(weight)
            met.add(base)
        degree = DEGREES.get(word, 1.0)
    total = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return math.tanh(2 * total / max(sum(weights), 2.0))


def _fluency(words: Sequence[str]) -> float:
    pairs, possible = list(pairwise(words)), possible_pairs()
    strange = sum(pair not in possible for pair in pairs)
    return max(0.0, 1 - 3 * strange / max(len(pairs), 1))


def _distinct_sentences(words: Sequence[str]) -> float:
    sentences: list[tuple[str, ...]] = []
    start = 0
    for index, word in enumerate(words, start=1):
        if word in SENTENCE_ENDS or index == len(words):
            sentences.append(tuple(map(str.lower, words[start:index])))
            start = index
    return len(set(sentences)) / max(len(sentences), 1)


def _pair_row(pair: Pair) -> dict[str, str]:
    return {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
