"""Estimate the win rate as if both policies wrote equally long answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plaudit.evaluate.statistics import Interval, around_share, design_effect

Numbers = npt.NDArray[np.float64]
RESAMPLES = 1000
WEAK = 1e-3
"""L2 penalty on both coefficients, which keeps them finite if one policy always wins."""
STEPS, LONGEST_STEP = 50, 2.0
"""Most steps of Newton's method, and the largest size to which a step is cut."""


def length_controlled(
    wins: Sequence[Sequence[float]], gaps: Sequence[Sequence[float]], *, seed: int
) -> Interval | None:
    """sigmoid(theta) of P(win) = sigmoid(theta + phi tanh(gap / s)), s the deviation of all gaps.

    `wins` and `gaps` have for each prompt the outcomes of its pairs (1, 0, or 1/2 for a tie) and the differences of
    lengths, ours - theirs. The length's part is estimated and then set to 0. Dubois et al. 2024, arXiv 2404.04475, eq.
    2, without the term of a prompt's difficulty, which takes many models. The interval is a share's, with the variance
    of resamples of prompts (bootstrap, Efron 1979). None if all gaps are equal: the length's part cannot be told from
    the policy's.
    """
    flat = np.array([gap for group in gaps for gap in group], dtype=np.float64)
    if not len(flat) or not flat.std() > 0:
        return None
    z = np.tanh(flat / flat.std())
    y = np.array([win for group in wins for win in group], dtype=np.float64)
    prompt = np.repeat(np.arange(len(wins)), [len(group) for group in wins])
    share = np.concatenate([np.full(len(group), 1 / len(group)) for group in wins if group])
    value = _sigmoid(_fitted(y, z, share[None]))
    draw, n = np.random.default_rng(seed), len(wins)
    counts = draw.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    chunk = max(1, 1_000_000 // len(y))
    parts = [_fitted(y, z, counts[i : i + chunk][:, prompt] * share) for i in range(0, RESAMPLES, chunk)]
    rate, spread = float(value[0]), float(np.var(_sigmoid(np.concatenate(parts))))
    own = design_effect([float(np.mean(group)) for group in wins if group])  # else all wins would look certain
    return around_share(rate, max(own, n * spread / (rate * (1 - rate))), n)


def _fitted(y: Numbers, z: Numbers, weights: Numbers) -> Numbers:
    """Fit theta and phi by Newton's method for each row of weights (rows, pairs); return theta, (rows,)."""
    theta = np.zeros(len(weights))
    phi = np.zeros(len(weights))
    for _ in range(STEPS):
        p = _sigmoid(theta[:, None] + phi[:, None] * z)
        error, curve = weights * (y - p), weights * p * (1 - p)
        a, b = error.sum(1) - WEAK * theta, error @ z - WEAK * phi
        taa, tab, tbb = curve.sum(1) + WEAK, curve @ z, curve @ (z * z) + WEAK
        whole = taa * tbb - tab * tab
        step = np.stack([(tbb * a - tab * b) / whole, (taa * b - tab * a) / whole])
        step *= np.minimum(1.0, LONGEST_STEP / np.maximum(np.abs(step).max(0), 1e-12))
        theta, phi = theta + step[0], phi + step[1]
        if np.abs(step).max() < 1e-9:
            break
    return theta


def _sigmoid(x: Any) -> Numbers:
    found: Numbers = 1 / (1 + np.exp(-np.clip(x, -500, 500)))
    return found
