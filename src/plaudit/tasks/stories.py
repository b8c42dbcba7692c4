"""Sums told in a sentence, for a small pretrained model to answer in one: `plaudit demo --pretrained`.

    "Anna has 7 apples and buys 5 more. How many apples does Anna have now?" -> "Anna has 12 apples now."

The answer is right if its last number is. The data is made from a seed; no question of the test is in training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from plaudit.data.write import write_rows

NAMES = tuple("Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina".split())
THINGS = ("apples", "books", "coins", "eggs", "flowers", "letters", "marbles", "oranges", "pencils", "stamps")
FORMS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", 1),
    ("There are {a} {things} in a box. {name} adds {b}. How many {things} are in the box now?", 1),
    ("{name} has {a} {things} and gives away {b}. How many {things} are left?", -1),
    ("{name} had {a} {things} and lost {b} of them. How many {things} does {name} still have?", -1),
)
"""(form of a question, 1 if the second number is added, -1 if it is subtracted)."""
SYSTEM = "Answer with one short sentence, such as: Anna has 5 apples now."
SENTENCE = re.compile(r"[^.!?\n]*\d[^.!?\n]*\.?\s*")
"""One sentence with a number."""


@dataclass(frozen=True, slots=True)
class Stories:
    """The files that `make_stories` writes."""

    prompts: Path
    prompts_test: Path


def make_stories(folder: Path, *, seed: int = 0, train: int = 2000, test: int = 128) -> Stories:
    """Write questions to train on and others to test on, as JSON lines with `prompt` (a chat) and `answer`."""
    source = random.Random(seed)
    asked: dict[str, str] = {}
    while len(asked) < train + test:
        form, sign = source.choice(FORMS)
        b = source.randint(2, 9)
        a = source.randint(b + 1 if sign < 0 else 2, 20)
        question = form.format(name=source.choice(NAMES), things=source.choice(THINGS), a=a, b=b)
        asked[question] = str(a + sign * b)
    rows = [{"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in asked.items()]
    folder.mkdir(parents=True, exist_ok=True)
    files = Stories(folder / "prompts.jsonl", folder / "prompts_test.jsonl")
    for path, part in ((files.prompts, rows[test:]), (files.prompts_test, rows[:test])):
        write_rows(path, part)
    return files


def right(completion: str, answer: str) -> float:
    """1 if the last number of the answer is the right one, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def brief(completion: str, finished: bool) -> float:
    """1 if the answer is one sentence with a number, which ended by itself, else 0."""
    return float(finished and SENTENCE.fullmatch(completion) is not None)
