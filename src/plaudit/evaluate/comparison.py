"""Compare two policies on the same prompts: how often one is better, by every reward that scored both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from plaudit.evaluate.generation import prompt_means
from plaudit.evaluate.policy import Answer, Answers
from plaudit.evaluate.statistics import Interval, bootstrap, mean_interval
from plaudit.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two answers to one prompt."""

    prompt: Prompt
    first: Answer
    second: Answer


def comparison_figures(first: Answers, second: Answers, *, seed: int) -> dict[str, Interval]:
    """By reward: the first one's win rate and the difference of the means, paired by prompt, with bootstrap intervals.

    A win counts 1, a tie 1/2, over the pairs of equally numbered answers; pairs that lack a score are left out.
    """
    figures: dict[str, Interval] = {}
    for name in first[0][0].scores:
        wins: list[float] = []
        differences: list[float] = []
        for ours, theirs in zip(first, second, strict=True):
            gaps = list(_gaps(ours, theirs, name))
            if gaps:
                wins.append(fmean(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps))
                differences.append(fmean(gaps))
        if not wins:
            raise ValueError(f"the reward {name!r} scored no prompt's answers of both policies")
        figures[f"win_rate/{name}"] = bootstrap(wins, seed=seed)
        figures[f"difference/{name}"] = bootstrap(differences, seed=seed)
        figures[f"reward/{name}/first"] = mean_interval(list(prompt_means(first, name).values()))
        figures[f"reward/{name}/second"] = mean_interval(list(prompt_means(second, name).values()))
    return figures


def _gaps(ours: list[Answer], theirs: list[Answer], name: str) -> Iterator[float]:
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.scores[name].value, other.scores[name].value
        if a is not None and b is not None:
            yield a - b


def side_by_side(first: Answers, second: Answers) -> list[Pairing]:
    """All pairs of answers, in the order of the prompts."""
    return [
        Pairing(prompt=one.prompt, first=one, second=other)
        for ours, theirs in zip(first, second, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]


def pairing_json(pairing: Pairing, names: tuple[str, str]) -> Mapping[str, Any]:
    """One line of the file of pairs; each answer under its policy's name."""
    answers = zip(names, (pairing.first, pairing.second), strict=True)
    texts = {name: {key: value for key, value in answer.json().items() if key != "prompt"} for name, answer in answers}
    return {"prompt": pairing.prompt.text, **texts}
