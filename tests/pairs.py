"""A training step on two pairs, for methods that learn from preferences without a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from plaudit.algorithms.base import Objective, Output
from plaudit.batch import Batch
from plaudit.types import Role, Row, Stats

LENGTHS = (3, 1, 2, 4)
"""Answer tokens of each row: chosen, rejected, chosen, rejected."""


def step(method: Objective, current: Tensor, *, weights: tuple[float, float] = (1.0, 1.0)) -> tuple[Tensor, Stats]:
    """Return loss and figures. Prompts have two tokens; untrained tokens hold 9, which no loss may read."""
    rows = [
        Row(tokens=(0,) * (2 + n), trainable=(False,) * 2 + (True,) * n, weight=weights[number // 2])
        for number, n in enumerate(LENGTHS)
    ]
    batch = method.weigh(Batch.of(rows, unit=2))
    logprobs = torch.full(batch.tokens.shape, 9.0, dtype=current.dtype).masked_scatter(batch.trainable, current)
    return method.losses()[Role.POLICY](Output(logprobs=logprobs), batch)


def drawn() -> Tensor:
    """Log-probs of the trained tokens."""
    return -2 * torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
