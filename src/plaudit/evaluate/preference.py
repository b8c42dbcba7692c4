"""Accuracy on pairs, by a judge's scores or by the log-ratios of a policy to its reference."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from plaudit.batch import Batch
from plaudit.evaluate.judge import Judge
from plaudit.evaluate.policy import Policy, check_comparable
from plaudit.evaluate.statistics import Interval, mean_interval, share_interval
from plaudit.maths.losses import preference_margin
from plaudit.types import Row


def margin_figures(margins: Sequence[float], prompts: Sequence[int]) -> dict[str, Interval]:
    """Share of margins (chosen - rejected) above 0, a tie counting half, and their mean; `prompts` gives each pair's
    prompt. Pairs of one prompt are averaged first: they depend on each other, and prompts weigh alike, as in
    training."""
    of_prompt: dict[int, list[float]] = {}
    for margin, prompt in zip(margins, prompts, strict=True):
        of_prompt.setdefault(prompt, []).append(margin)
    right = [fmean(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in of_one) for of_one in of_prompt.values()]
    return {"accuracy": share_interval(right), "margin": mean_interval([fmean(m) for m in of_prompt.values()])}


def judge_margins(judge: Judge, rows: Sequence[Row]) -> list[float]:
    """Return score(chosen) - score(rejected) of each pair. `rows` alternates chosen and rejected answers."""
    scores = judge.of_sequences([tuple(row.tokens) for row in rows])
    return [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]


def implied_margins(
    policy: Policy, reference: Policy, rows: Sequence[Row], *, token_budget: int = 16384
) -> list[float]:
    """h = (chosen - rejected) of summed log policy - log reference: DPO's implied reward, before its factor beta."""
    check_comparable(policy, reference)
    batch = Batch.of(rows, unit=2)
    ours, theirs = (model.logprobs(batch, token_budget=token_budget).double() for model in (policy, reference))
    margins: list[float] = preference_margin(ours, theirs, batch.trainable, batch.row, len(batch)).tolist()
    return margins
