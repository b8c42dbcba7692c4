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

Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


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


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t: the table, beyond it the first terms of its expansion around the normal's."""
    if degrees <= len(T):
        return T[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def _around(value: float, error: float, count: int) -> Interval:
    """value +- t * standard error."""
    reach = math.inf if count < 2 else t_quantile(count - 1) * error
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
    """Interval of a share, inside [0, 1] and honest near its ends; ties may count half. Wilson 1927."""
    if not 0 <= successes <= count or count < 1:
        raise ValueError(f"{successes} successes out of {count} is not a share")
    share, z2 = successes / count, Z * Z / count
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
    data, n = np.asarray(values, dtype=np.float64), len(values)
    draw = np.random.default_rng(seed)
    chunk = max(1, 1_000_000 // n)
    means = np.concatenate(
        [
            data[draw.integers(0, n, size=(min(chunk, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, chunk)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(value=float(data.mean()), low=float(low), high=float(high), count=n)


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
