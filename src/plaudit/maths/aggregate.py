"""Weights by which token and row losses become the one number that is minimised, for every method.

A weight says what share of the optimizer step's mean a token (or row) is. Weights are made once over the whole step,
before it is cut into micro-batches or spread over ranks, and then only summed: how the step is cut cannot change the
gradient.
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from plaudit.maths.ragged import row_sum


class Aggregation(StrEnum):
    TOKEN = "token"
    """Mean over all trained tokens of the step: long answers count more."""
    SEQUENCE = "sequence"
    """Mean over each row's trained tokens, then over rows: every answer counts the same (GRPO's paper)."""
    CONSTANT = "constant"
    """Sum over a row's tokens divided by a constant, then the mean over rows (Dr.GRPO)."""


def token_weights(trainable: Tensor, row: Tensor, rows: int, how: Aggregation, *, constant: float = 1.0) -> Tensor:
    """Return the weight of each token, (n,); 0 for untrained tokens. m is 1 for trained tokens, else 0.

        token  m_t / sum m       sequence  m_t / (rows * sum_row m)       constant  m_t / (rows * constant)

    `rows` includes rows without trained tokens: masking a row changes other rows' weights only with `token`, as in
    TRL's GRPO and Dr.GRPO losses (`mask_truncated_completions`).
    """
    mask = trainable.float()
    if how is Aggregation.TOKEN:
        return mask / mask.sum().clamp(min=1.0)
    if how is Aggregation.SEQUENCE:
        return mask / (row_sum(mask, row, rows).clamp(min=1.0)[row] * rows)
    return mask / (rows * constant)


def unit_weights(row_weight: Tensor, unit: int) -> Tensor:
    """Return row weights (r,) scaled so that those of the units' first rows sum to 1; a pair's rows have equal ones."""
    return row_weight / row_weight.view(-1, unit)[:, 0].sum()
