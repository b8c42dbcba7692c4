"""How often pairs are ordered as labelled, by a judge's scores or by the log-ratios of a policy to its reference."""

from __future__ import annotations

from collections.abc import Sequence

from assent.batch import Batch
from assent.evaluate.judge import Judge
from assent.evaluate.policy import Policy, check_comparable
from assent.evaluate.statistics import Interval, mean_interval, wilson
from assent.maths.losses import preference_margin
from assent.types import Row


def margin_figures(margins: Sequence[float]) -> dict[str, Interval]:
    """Share of margins (chosen - rejected) above 0, a tie counting half, and their mean."""
    right = sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins)
    return {"accuracy": wilson(right, len(margins)), "margin": mean_interval(margins)}


def judge_margins(judge: Judge, rows: Sequence[Row]) -> list[float]:
    """Score of the chosen answer minus that of the rejected one, for rows that alternate so."""
    scores = judge.scores(Batch.of(rows))
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
