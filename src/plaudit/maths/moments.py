"""Running mean and deviation for value normalisation: an exponential average, debiased, in plain floats."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moments:
    """Debiased exponential averages of x and x^2 (as PopArt, van Hasselt et al. 2016, keeps them).

    Before the first update mean is 0 and std 1, so normalising is the identity. Updates return a new value; the
    fields are what a checkpoint saves.
    """

    first: float = 0.0
    second: float = 0.0
    debias: float = 0.0

    @property
    def mean(self) -> float:
        return self.first / self.debias if self.debias else 0.0

    @property
    def std(self) -> float:
        if not self.debias:
            return 1.0
        variance = self.second / self.debias - self.mean**2
        return math.sqrt(max(variance, 1e-4))

    def updated(self, mean: float, mean_square: float, *, decay: float) -> Moments:
        """Blend in one step's mean of x and of x^2, old averages kept with weight `decay`."""
        keep, take = decay, 1.0 - decay
        return Moments(
            keep * self.first + take * mean, keep * self.second + take * mean_square, keep * self.debias + take
        )
