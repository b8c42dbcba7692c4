"""Questions of the package reasoning-gym (an extra), which makes and scores them: `reasoning_gym:chain_sum?size=2000`.

    source, split -> its questions, as rows          row, answer -> the score by the task's own scorer

A question's text decides its split, so none is in two splits, whatever the seeds, sizes and settings of the sources. A
row names its source and the question's number in it: the scorer generates the question again, with all that it knows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from plaudit.support.fields import nearest

PREFIX = "reasoning_gym:"
LACKING = (
    "tasks of reasoning-gym need that package, which is not installed: pip install -e '.[reasoning-gym]' in Plaudit's "
    "folder (a dependency, pycosat, needs a C compiler)"
)
RUN_AS_PYTHON = (
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion"
)
UNREPEATABLE = "isomorphic_strings knight_swap list_functions ransom_note word_ladder"
REFUSED = {
    **dict.fromkeys(RUN_AS_PYTHON.split(), "its scorer runs answers as Python code"),
    **dict.fromkeys(UNREPEATABLE.split(), "it has other questions or answers in every process"),
    "composite": "it mixes tasks, which a list of sources does too",
}
"""Tasks that are not read, and why."""
SPLITS = {"test": 1, "validation": 1, "train": 6}
"""Eighths of all possible questions."""
SIZE = 2000
DRAWS = 10
"""Questions to generate at most for each that a split is to have, since 7 of 8 are of other splits."""


def questions(source: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield the different questions of a split, up to the source's `size`: fewer where the task has no more.

    Raises ValueError for a source that names no task or settings that the task does not take, and for other splits.
    """
    if split not in SPLITS:
        raise ValueError(f"it has no split {split!r}{nearest(split, SPLITS)}")
    dataset, seen = generator(source), set[str]()
    for index in range(len(dataset)):
        entry = dataset[index]
        question = entry["question"]
        if split_of(question) != split or question in seen:
            continue
        seen.add(question)
        yield {"prompt": question, "answer": entry["answer"], "reasoning_gym": source, "index": index}
        if len(seen) * DRAWS == len(dataset):
            return


def split_of(question: str) -> str:
    eighth = hashlib.sha256(question.encode()).digest()[0] % 8
    return "test" if eighth == 0 else "validation" if eighth == 1 else "train"


def score(completion: str, answer: str | None, reasoning_gym: str, index: int, *, partial: bool = True) -> float:
    """The task's own score, 0 to 1, of the text in the last <answer> ... </answer>, or of the whole answer if there is
    none. `partial=false` makes every score below 1 a 0. The other parameters are columns of the source's rows."""
    dataset = generator(reasoning_gym)
    entry = dataset[index]
    if entry["answer"] != answer:
        raise ValueError(f"question {index} of {reasoning_gym} has another answer here: another version wrote the row")
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(completion)
    found = float(dataset.score_answer(completion.strip() if tagged is None else tagged, entry))
    return found if partial else float(found >= 1)


@functools.cache
def generator(source: str) -> Any:
    """Return the package's data set, which generates a question for each index. Raises ValueError as `questions`."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ValueError(LACKING) from error
    tasks: Mapping[str, Any] = reasoning_gym.factory.DATASETS
    task, _, query = source.removeprefix(PREFIX).partition("?")
    if task not in tasks:
        raise ValueError(f"reasoning-gym has no task {task!r}{nearest(task, tasks)}")
    if task in REFUSED:
        raise ValueError(f"{task} is not read, because {REFUSED[task]}")
    given = {"seed": 0, "size": SIZE} | _typed(query, [one.name for one in fields(tasks[task][1])])
    try:
        return reasoning_gym.create_dataset(task, **given | {"size": DRAWS * given["size"]})
    except (AssertionError, TypeError, ValueError, LookupError, OSError) as error:
        raise ValueError(f"{task} refuses these settings: {type(error).__name__}: {error}") from error


def _typed(query: str, known: list[str]) -> dict[str, Any]:
    """Return the settings in a query, by YAML's rules."""
    import yaml

    found: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in known:
            raise ValueError(f"it has no setting {key!r}{nearest(key, known)}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{key}={value} is not a value in YAML") from error
        least = {"seed": 0, "size": 1}.get(key)
        if not equals or (least is not None and (type(found[key]) is not int or found[key] < least)):
            raise ValueError(f"{part!r} must be {key}=VALUE" + f", a whole number from {least}" * (least is not None))
    return found
