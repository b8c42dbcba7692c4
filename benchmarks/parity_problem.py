"""Random problems on which losses are compared: log-probs of answers of odd lengths, and what belongs to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = ((3, 5, 1, 2, 7, 4, 4, 1), (1, 1, 9, 2, 3, 3, 5, 8), (6,) * 8)
FEATURES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Padding at the right holds random numbers, which must not count. Log-probs are base + features @ weights."""

    lengths: tuple[int, ...]
    mask: Tensor  # (r, w)
    base: Tensor  # (r, w)
    features: Tensor  # (r, w, f)
    weights: Tensor  # (f, 1)
    old: Tensor  # (r, w)
    reference: Tensor  # (r, w)
    values: Tensor  # (r, w)
    returns: Tensor  # (r, w)
    advantages: Tensor  # (r,)
    rewards: Tensor  # (r,)
    margins: Tensor  # (r / 2,)
    group: int = 4
    tools: Tensor | None = None  # (r, w): tokens of an answer that a tool wrote; None without tools

    def current(self, weights: Tensor) -> Tensor:
        """The policy's log-probs, below 0."""
        return (self.base + (self.features @ weights)[..., 0]).clamp(max=-1e-4)


def problem(seed: int, *, extreme: bool) -> Problem:
    """Extremes: log-probs down to -60, ratios of e^3, rewards of hundreds, one group of equal rewards."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = LENGTHS[seed % len(LENGTHS)]
    rows, width = len(lengths), max(lengths)
    grid, size, far = (rows, width), 60.0 if extreme else 2.0, 3.0 if extreme else 0.3
    base = -0.1 - size * uniform(*grid)
    rewards = ((uniform(rows) - 0.5) * (600.0 if extreme else 2.0)).float().double()
    if extreme:
        rewards[:4] = 100.0
    values = uniform(*grid) - 0.5
    return Problem(
        lengths=lengths,
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        base=base,
        features=uniform(*grid, FEATURES) - 0.5,
        weights=0.2 * (uniform(FEATURES, 1) - 0.5),
        old=base + far * 2 * (uniform(*grid) - 0.5),
        reference=base + far * 2 * (uniform(*grid) - 0.5),
        values=values,
        returns=values + 0.5 * (uniform(*grid) - 0.5),
        advantages=(uniform(rows) - 0.5) * (40.0 if extreme else 4.0),
        rewards=rewards,
        margins=uniform(rows // 2).float().double(),
    )
