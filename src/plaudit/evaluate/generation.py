"""Figures of a policy's own answers: rewards, length, variety, and whether they end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from plaudit.evaluate.policy import Answers
from plaudit.evaluate.statistics import Interval, mean_interval, pass_at_k, share_interval
from plaudit.support.visible import visible

Figures = dict[str, Interval | float]
TAKEN = {"failed", "not_applicable", "first", "second"}  # reserved: a part with such a name is not shown


def generation_figures(answers: Answers) -> Figures:
    """Return the answers' mean length in tokens, the share cut off by length, and distinct words and word pairs."""
    texts = [answer.completion.text for group in answers for answer in group]
    return {
        "length": mean_interval([fmean(a.completion.length for a in group) for group in answers]),
        "unfinished": share_interval([fmean(not a.finished for a in group) for group in answers]),
        **_counts(answers),
        **{f"distinct_{n}": share for n in (1, 2) if (share := distinct(texts, n)) is not None},
    }


def _counts(answers: Answers) -> Figures:
    """Means of the counts of episodes that have them, such as their turns; {} for answers of one turn."""
    groups = [[a.completion.episode.counts for a in group if a.completion.episode is not None] for group in answers]
    figures: Figures = {}
    for name in dict.fromkeys(name for own in groups for one in own for name in one):
        values = [[one[name] for one in own if name in one] for own in groups]
        figures[name] = mean_interval([fmean(own) for own in values if own])
    return figures


def reward_figures(answers: Answers) -> Figures:
    """Return each reward's and part's mean, and how many answers it failed on or does not apply to, if any.
    Answers to a prompt are averaged first. Raises ValueError with a reason if a reward scored nothing."""
    figures: Figures = {}
    for name in answers[0][0].scores:
        figures[f"reward/{name}"] = reward_mean(answers, name)
        parts = [[answer.parts(name) for answer in group] for group in answers]
        for part in sorted({part for group in parts for own in group for part in own} - TAKEN):
            figures[f"reward/{name}/{part}"] = _mean([[own[part] for own in group if part in own] for group in parts])
        scores = [answer.scores[name] for group in answers for answer in group]
        if failed := sum(score.failed for score in scores):
            figures[f"reward/{name}/failed"] = float(failed)
        if others := sum(not score.applicable for score in scores):
            figures[f"reward/{name}/not_applicable"] = float(others)
    return figures


def pass_figures(answers: Answers, names: Collection[str], ks: Sequence[int], *, least: float) -> Figures:
    """Return pass@k of each named reward, averaged over prompts: an answer passes with a score of at least `least`.
    Answers without a score, and prompts with fewer than k scores, are left out. ValueError if no prompt is left."""
    figures: Figures = {}
    for name in names:
        scores = _values(answers, name)
        for k in ks:
            found = [pass_at_k(len(own), sum(v >= least for v in own), k) for own in scores if len(own) >= k]
            if not found:
                raise ValueError(f"pass@{k}: {name!r} scored {k} answers of no prompt")
            figures[f"pass@{k}/{name}"] = share_interval(found)
    return figures


def reward_mean(answers: Answers, name: str) -> Interval:
    """Return the mean over prompts of a reward's mean over answers. Raises ValueError if no answer has a score."""
    values = _values(answers, name)
    if not any(values):
        first = answers[0][0]
        reason = visible(f"{first.scores[name].reason} ({first.completion.text[:80]!r})", line=True)
        raise ValueError(f"the reward {name!r} scored no answer; the first: {reason}")
    return _mean(values)


def verdicts(answers: Answers, name: str) -> bool:
    """True if all of a reward's scores are 0, 1 or missing, as those of a rule that checks answers."""
    return all(answer.scores[name].value in (0, 1, None) for group in answers for answer in group)


def _values(answers: Answers, name: str) -> list[list[float]]:
    """Return a reward's scores by prompt, without answers that have none."""
    return [[value for answer in group if (value := answer.scores[name].value) is not None] for group in answers]


def _mean(values: Sequence[Sequence[float]]) -> Interval:
    """Mean of the prompts' means, without empty prompts; its interval is a share's if all values are 0 or 1."""
    means = [fmean(own) for own in values if own]
    return share_interval(means) if all(value in (0, 1) for own in values for value in own) else mean_interval(means)


def distinct(texts: Sequence[str], n: int) -> float | None:
    """Different runs of n words / all runs of n words, over all texts together: lower means more alike.

    None if no text has n words. It falls with the amount of text, so compare equal numbers of answers. Li et al. 2016,
    arXiv 1510.03055.
    """
    runs = [run for text in texts for run in _runs(text.split(), n)]
    return len(set(runs)) / len(runs) if runs else None


def _runs(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
