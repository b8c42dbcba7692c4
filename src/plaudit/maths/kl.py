"""Estimators of KL(policy || reference) from samples of the policy, and the controller of its coefficient.

d = log pi - log pi_ref of the sampled token. Schulman 2020, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(d: Tensor) -> Tensor:
    """d: unbiased, of either sign, with high variance. Use it in a reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; for samples of the policy its gradient, d grad log pi, is the KL's gradient."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative. In a loss its gradient is that of KL(reference || policy)."""
    return torch.expm1(-d) + d  # exp(-d) - 1 + d loses a small KL to rounding, and may come out below 0


def weighted_k3(d: Tensor, log_ratio: Tensor) -> Tensor:
    """rho k3(d), rho = exp(log_ratio) = pi / pi_old with its gradient, (n,), under samples of pi_old.

    Unbiased in value and gradient: the gradient is rho d grad log pi (DeepSeek-V3.2, 2025,
    https://arxiv.org/abs/2512.02556, section 3.1). Where rho is 1, each token's gradient is that of k2.
    """
    return log_ratio.exp() * k3(d)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, sequences: int) -> float:
    """beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon).

    `sequences / horizon` is limited to 1: above 5, beta could become negative, which would reward straying from the
    reference.

    `kl` is the sum of k1 over a sequence, averaged over sequences, in nats: published targets are of such sums, not of
    token means. Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(sequences / horizon, 1.0))
