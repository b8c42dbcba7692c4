"""How single losses become the one number that is minimised: the same function for every method.

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
    """Weight of each token, (n,); 0 where not trained.

        token  m_t / sum m       sequence  m_t / (rows * sum_row m)       constant  m_t / (rows * constant)

    Every row counts as a row: masking one leaves the others' weights as they were, unless they are a mean over tokens.
    So do GRPO's and Dr.GRPO's losses in TRL (`mask_truncated_completions`).
    """
    mask = trainable.float()
    if how is Aggregation.TOKEN:
        return mask / mask.sum().clamp(min=1.0)
    if how is Aggregation.SEQUENCE:
        return mask / (row_sum(mask, row, rows).clamp(min=1.0)[row] * rows)
    return mask / (rows * constant)


def unit_weights(row_weight: Tensor, unit: int) -> Tensor:
    """Weight of each row, (r,), such that the first rows of all units sum to 1 (both rows of a pair carry it)."""
    return row_weight / row_weight.view(-1, unit)[:, 0].sum()
