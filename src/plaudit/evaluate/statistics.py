"""95 % confidence intervals for means, ratios, shares and win rates: plain numbers in, an `Interval` out.

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
    """An estimate with its 95 % confidence interval; the bounds are infinite for a single observation, which gives
    none."""

    value: float
    low: float
    high: float
    count: int
    """Number of independent observations."""

    def map(self, monotone: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the figure."""
        return Interval(value=monotone(self.value), low=monotone(self.low), high=monotone(self.high), count=self.count)

    def json(self) -> dict[str, float | int | None]:
        """Infinite bounds as null: JSON has no infinity."""
        bounds = {"value": self.value, "low": self.low, "high": self.high}
        return {name: bound if math.isfinite(bound) else None for name, bound in bounds.items()} | {"count": self.count}


def _around(value: float, error: float, count: int) -> Interval:
    """value +- t * standard error."""
    reach = math.inf if count < 2 else float(stdtrit(count - 1, UPPER)) * error
    return Interval(value=value, low=value - reach, high=value + reach, count=count)


def mean_interval(values: Sequence[float]) -> Interval:
    """mean +- t * s / sqrt(n), Student's t with n - 1 degrees of freedom."""
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


def wilson(successes: float, count: int) -> Interval:
    """Interval of a share, inside [0, 1] and honest near its ends. Wilson 1927. Ties may count half, which scipy's
    function does not take."""
    if not 0 <= successes <= count or count < 1:
        raise ValueError(f"{successes} successes out of {count} is not a share")
    z = float(ndtri(UPPER))
    share, z2 = successes / count, z * z / count
    centre = (share + z2 / 2) / (1 + z2)
    reach = math.sqrt(z2 * share * (1 - share) + z2 * z2 / 4) / (1 + z2)
    # At 0 and 1 the bound is exact; rounding must not push the share out of its interval.
    low, high = min(max(0.0, centre - reach), share), max(min(1.0, centre + reach), share)
    return Interval(value=share, low=low, high=high, count=count)


def bootstrap(values: Sequence[float], *, seed: int, resamples: int = 10_000) -> Interval:
    """Mean and the 2.5 % and 97.5 % quantiles of the means of resamples with replacement. Efron 1979.

    It is paired if each value already compares two models on one prompt (a win, a difference). It cannot see beyond the
    values: if all are equal the interval is a point.
    """
    if not values:
        raise ValueError("there is nothing to resample")
    from scipy.stats import bootstrap as resampled  # a second to import

    data, n = np.asarray(values, dtype=np.float64), len(values)
    mean = float(data.mean())
    if n == 1:
        return Interval(value=mean, low=mean, high=mean, count=1)
    draw, batch = np.random.default_rng(seed), max(1, 1_000_000 // n)
    found = resampled((data,), np.mean, n_resamples=resamples, batch=batch, method="percentile", rng=draw)
    low, high = found.confidence_interval
    return Interval(value=mean, low=float(low), high=float(high), count=n)


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
