"""What a policy's own answers are like: their rewards, whether they end, how long and how varied they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from plaudit.evaluate.policy import Answer, Answers
from plaudit.evaluate.statistics import Interval, mean_interval, wilson

Figures = dict[str, Interval | float]


def generation_figures(answers: Answers) -> Figures:
    """Length in tokens, share cut off by length, and distinct words and word pairs."""
    texts = [answer.completion.text for group in answers for answer in group]
    return {
        "length": mean_interval([fmean(len(a.completion.tokens) for a in group) for group in answers]),
        "unfinished": wilson(sum(fmean(not a.finished for a in group) for group in answers), len(answers)),
        "distinct_1": distinct(texts, 1),
        "distinct_2": distinct(texts, 2),
    }


def reward_figures(answers: Answers) -> Figures:
    """Mean of every reward; where some answers could not be scored, also how many.

    Several answers to a prompt are averaged first. Raises ValueError, with its reason, if a reward scored nothing.
    """
    figures: Figures = {}
    for name in answers[0][0].scores:
        means, failed = prompt_means(answers, name)
        figures[f"reward/{name}"] = mean_interval(list(means.values()))
        if failed:
            figures[f"reward/{name}/failed"] = float(failed)
    return figures


def prompt_means(answers: Answers, name: str) -> tuple[dict[int, float], int]:
    """Mean score by a reward of each prompt's scored answers, by the prompt's place; and how many have no score."""
    means: dict[int, float] = {}
    failed = 0
    for place, group in enumerate(answers):
        values = [value for answer in group if (value := answer.scores[name].value) is not None]
        failed += len(group) - len(values)
        if values:
            means[place] = fmean(values)
    if not means:
        raise ValueError(f"the reward {name!r} scored no answer; the first: {_reason(answers[0][0], name)}")
    return means, failed


def _reason(answer: Answer, name: str) -> str:
    return f"{answer.scores[name].reason} ({answer.completion.text[:80]!r})"


def distinct(texts: Sequence[str], n: int) -> float:
    """Different runs of n words / all runs of n words, over all texts together: lower means more alike.

    It falls with the amount of text, so compare equal numbers of answers. Li et al. 2016, arXiv 1510.03055.
    """
    runs = [run for text in texts for run in _runs(text.split(), n)]
    return len(set(runs)) / len(runs) if runs else math.nan


def _runs(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
