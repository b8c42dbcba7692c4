"""How well a policy predicts answers that it did not write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assent.batch import Batch
from assent.evaluate.policy import Advance, Policy, unheard
from assent.evaluate.statistics import Interval, ratio_interval
from assent.maths.ragged import row_sum
from assent.types import Row


def perplexity(
    policy: Policy, rows: Sequence[Row], *, token_budget: int = 16384, advance: Advance = unheard
) -> dict[str, Interval]:
    """nll = -sum of log-probs / number of the answers' tokens (every token weighs alike); perplexity = exp(nll)."""
    batch = Batch.of(rows)
    logprobs = policy.logprobs(batch, token_budget=token_budget, advance=advance)
    surprise = -row_sum(logprobs.double(), batch.row, len(batch))  # 0 on the prompts
    tokens = [sum(row.trainable) for row in rows]
    nll = ratio_interval(surprise.tolist(), [float(count) for count in tokens])
    return {"nll": nll, "perplexity": nll.map(_exp)}


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
