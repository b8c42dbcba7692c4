"""KL(policy || reference), estimated on the policy's own answers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plaudit.batch import Batch
from plaudit.evaluate.policy import Advance, Answers, Policy, check_comparable, unheard
from plaudit.evaluate.statistics import Interval, mean_interval, ratio_interval
from plaudit.maths.kl import ESTIMATORS
from plaudit.maths.ragged import row_sum
from plaudit.types import Row


def kl_figures(
    policy: Policy,
    reference: Policy,
    answers: Answers,
    *,
    temperature: float,
    token_budget: int = 16384,
    advance: Advance = unheard,
) -> dict[str, Interval]:
    """Return the KL in nats: summed over an answer, averaged over answers (`kl`); averaged over tokens (`kl/token`).

    d = log policy - log reference of each sampled token, both of logits / temperature; k1 = d
    gives `kl`, and k3 gives `kl_k3`. Values and bounds below 0 become 0. Answers must be whole samples of the policy.
    """
    check_comparable(policy, reference)
    rows = [[row for answer in group for row in answer.rows()] for group in answers]
    batch = Batch.of([row for group in rows for row in group])
    ours, theirs = (
        model.logprobs(batch, temperature=temperature, token_budget=token_budget, advance=advance)
        for model in (policy, reference)
    )
    d = ours.double() - theirs.double()  # 0 on the prompts, where k1 and k3 are 0 too
    tokens = _by_prompt(batch.trainable.double(), batch, rows)
    figures: dict[str, Interval] = {}
    for name, estimator in (("kl", ESTIMATORS["k1"]), ("kl_k3", ESTIMATORS["k3"])):
        sums = _by_prompt(estimator(d), batch, rows)
        means = [total / len(group) for total, group in zip(sums, answers, strict=True)]
        figures[name] = mean_interval(means)
        figures[f"{name}/token"] = ratio_interval(sums, tokens)
    return {name: figure.map(lambda x: max(x, 0.0)) for name, figure in figures.items()}


def _by_prompt(x: Tensor, batch: Batch, rows: Sequence[Sequence[Row]]) -> list[float]:
    """Sums of a per-token column over all answers to each prompt."""
    sums = iter(row_sum(x, batch.row, len(batch)).tolist())
    return [sum(next(sums) for _ in group) for group in rows]
