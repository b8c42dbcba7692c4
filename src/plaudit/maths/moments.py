"""Running mean and deviation for value normalisation: an exponential average, debiased, in plain floats."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moments:
    """Exponential averages of x and x^2, debiased when read (as in PopArt, van Hasselt et al. 2016).

    Before the first update mean is 0 and std 1, so normalising is the identity. `updated` returns a new object. A
    checkpoint saves the three fields.
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
        """Return averages with one step's means of x and x^2 blended in; the old averages have weight `decay`."""
        keep, take = decay, 1.0 - decay
        return Moments(
            keep * self.first + take * mean, keep * self.second + take * mean_square, keep * self.debias + take
        )
