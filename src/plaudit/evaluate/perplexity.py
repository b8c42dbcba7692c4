"""Perplexity of a policy on the answers of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from plaudit.batch import Batch
from plaudit.evaluate.policy import Advance, Policy, unheard
from plaudit.evaluate.statistics import Interval, ratio_interval
from plaudit.maths.ragged import row_sum
from plaudit.types import Row


def perplexity(
    policy: Policy, rows: Sequence[Row], *, token_budget: int = 16384, advance: Advance = unheard
) -> dict[str, Interval]:
    """nll = -sum of log-probs / number of the answers' tokens (every token weighs alike); perplexity = exp(nll). Rows
    of one group, a chat's turns, are counted as one: they depend on each other."""
    batch = Batch.of(rows)
    logprobs = policy.logprobs(batch, token_budget=token_budget, advance=advance)
    place = {group: i for i, group in enumerate(dict.fromkeys(row.group for row in rows))}
    chat = torch.tensor([place[row.group] for row in rows])[batch.row]
    surprise, tokens = (
        row_sum(column.double(), chat, len(place)).tolist()
        for column in (-logprobs, batch.trainable)  # both 0 on the prompts
    )
    nll = ratio_interval(surprise, tokens)
    return {"nll": nll, "perplexity": nll.map(_exp)}


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
