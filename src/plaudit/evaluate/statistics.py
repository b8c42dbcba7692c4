"""95 % confidence intervals for means, ratios and shares, such as win rates: plain numbers in, an `Interval` out.

Averaged values must be independent. Several answers to one prompt are therefore averaged first, and prompts are
counted. Left out: other levels than 95 %, and corrections for looking at many figures at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.special import ndtri, stdtrit

UPPER = 0.975
"""Probability below an interval's upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % confidence interval. Bounds of a mean or ratio are infinite if there is only one
    observation."""

    value: float
    low: float
    high: float
    count: int
    """Number of independent observations."""

    def map(self, monotone: Callable[[float], float]) -> Interval:
        """Apply an increasing function to the value and its bounds."""
        return Interval(value=monotone(self.value), low=monotone(self.low), high=monotone(self.high), count=self.count)

    def json(self) -> dict[str, float | int | None]:
        """Return the fields, with None for infinite numbers, which JSON lacks."""
        bounds = {"value": self.value, "low": self.low, "high": self.high}
        return {name: bound if math.isfinite(bound) else None for name, bound in bounds.items()} | {"count": self.count}


def _around(value: float, error: float, count: int) -> Interval:
    """value +- t * standard error."""
    reach = math.inf if count < 2 else float(stdtrit(count - 1, UPPER)) * error
    return Interval(value=value, low=value - reach, high=value + reach, count=count)


def mean_interval(values: Sequence[float]) -> Interval:
    """mean +- t * s / sqrt(n), Student's t with n - 1 degrees of freedom. Raises ValueError for no values."""
    if not values:
        raise ValueError("there is no mean of no values")
    n = len(values)
    return _around(fmean(values), stdev(values) / math.sqrt(n) if n > 1 else 0.0, n)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """R = sum a / sum b, such as a mean over tokens, with the spread of whole texts: tokens of one text depend.

    Linearised (delta method): se = sqrt(n / (n - 1) * sum (a_i - R b_i)^2) / sum b. Cochran 1977, section 6.4.
    """
    if not denominators or not (total := math.fsum(denominators)) > 0:
        raise ValueError("a ratio needs denominators that add up to more than 0")
    n, ratio = len(numerators), math.fsum(numerators) / total
    spread = math.fsum((a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return _around(ratio, math.sqrt(n / (n - 1) * spread) / total if n > 1 else 0.0, n)


def share_interval(values: Sequence[float]) -> Interval:
    """Mean of values from 0 to 1: wins, ties of 1/2, and means of them over a prompt's answers.

    It is paired if each value compares two models on one prompt. Raises ValueError for no values and for one outside
    [0, 1].
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"a share needs values from 0 to 1, at least one: {[v for v in values if not 0 <= v <= 1]}")
    return around_share(fmean(values), design_effect(values), len(values))


def design_effect(values: Sequence[float]) -> float:
    """Return Var(values) / (p (1 - p)) for values in [0, 1] with mean p; zeros and ones give 1. Kish 1965."""
    binary = fmean(values) * (1 - fmean(values))
    return float(np.var(values)) / binary if binary > 0 else 1.0


def around_share(share: float, effect: float, count: int) -> Interval:
    """Wilson's interval (1927) of a share m, from `count` n observations that are worth N independent ones.

        low, high: (share - m)^2 = z^2 m (1 - m) / N       N = n (n + z^2) / (n effect + z^2)

    Zeros and ones have the effect 1, and N = n. Other values count for more; their effect is pulled to 1 by z^2
    observations, so that equal values do not look certain.
    """
    z2, binary = float(ndtri(UPPER)) ** 2, share * (1 - share)
    z2_n = z2 * (count * effect + z2) / (count * (count + z2))  # z^2 / N
    centre = (share + z2_n / 2) / (1 + z2_n)
    reach = math.sqrt(z2_n * binary + z2_n * z2_n / 4) / (1 + z2_n)
    # At 0 and 1 the bound is exact; rounding must not push the share out of its interval.
    low, high = min(max(0.0, centre - reach), share), max(min(1.0, centre + reach), share)
    return Interval(value=share, low=low, high=high, count=count)


def pass_at_k(answers: int, passing: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that at least one of k answers passes, unbiased from n >= k of which c do.

    The share of k-sets drawn without replacement that hold a passing one; 1 - (1 - c/n)^k would be too low. As a
    product, 1 - prod over i = n - c + 1 ... n of (1 - k / i), it does not overflow. Chen et al. 2021, arXiv
    2107.03374, eq. 1.
    """
    if not 0 <= passing <= answers or not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {passing} passing answers out of {answers} is not defined")
    if answers - passing < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(answers - passing + 1, answers + 1))
