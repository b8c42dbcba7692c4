"""Losses, one value per token (n,), row (r,) or pair (p,). Methods weigh them (`aggregate.py`) and sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from plaudit.maths.ragged import row_mean, row_sum

LEVELS = ("token", "sequence", "geometric")
"""Levels of importance ratios, see `log_ratio`."""


def log_ratio(current: Tensor, old: Tensor, trainable: Tensor, row: Tensor, rows: int, *, level: str) -> Tensor:
    """log pi_current - log pi_old, (n,), at one of three levels; 0 on untrained tokens.

    `token`: the token's own difference. `sequence`: the sum over its row (RLOO's paper). `geometric`: the mean over
    its row's trained tokens (GSPO, Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. 7).
    """
    difference = torch.where(trainable, current - old, torch.zeros_like(current))
    if level == "token":
        return difference
    if level == "sequence":
        return row_sum(difference, row, rows)[row] * trainable
    return row_mean(difference, trainable, row, rows)[row] * trainable


def clipped_policy(
    log_ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), (n,). With `dual` c > 1: at most -c A where A < 0.

    The gradient is 0 where rho is beyond the clip on A's side, and stays where rho moved against A (`dual`: up to c).
    PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; dual clip, Ye et al. 2020; low != high is
    DAPO's clip-higher, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 10.
    """
    # Beyond this the loss is flat. An overflow there would give 0 * inf, a NaN, in the loss or its gradient.
    flat = torch.where(advantages < 0, math.inf if dual is None else math.log(dual), math.log1p(high)) + 1.0
    ratio = torch.minimum(log_ratio, flat.to(log_ratio)).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)


def cispo(log_ratio: Tensor, current: Tensor, advantages: Tensor, *, cap: float) -> Tensor:
    """-min(rho, cap) A log pi, (n,), without a gradient through rho: every token keeps a gradient of log pi.

    `log_ratio` is against the policy that sampled, `current` is log pi. MiniMax-M1 2025,
    https://arxiv.org/abs/2506.13585, eq. 4 and 5, without a lower bound, as there.
    """
    return -log_ratio.detach().clamp(max=math.log(cap)).exp() * advantages * current


def off_policy_weight(
    learner: Tensor, sampler: Tensor, trainable: Tensor, row: Tensor, rows: int, *, level: str, how: str, cap: float
) -> Tensor:
    """w = pi_learner / pi_sampler, bounded, for samples that another policy drew; 1 on untrained tokens, (n,).

    `learner` and `sampler` (n,) are log-probs: the learner's before the step's first update, and the behaviour's.
    `level` is as in `log_ratio`: w of the token, of the row (product) or its geometric mean. `how`: `truncate` gives
    min(w, cap) (truncated importance sampling, Ionides 2008; for samplers that are not the learner, Yao et al. 2025);
    `mask` gives 1 where w lies in [1 / cap, cap], else 0.
    """
    difference = log_ratio(learner, sampler, trainable, row, rows, level=level)
    if how == "truncate":
        return difference.clamp(max=math.log(cap)).exp()
    return (difference.abs() <= math.log(cap)).to(learner)


def clip_fraction(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """True where the clip makes the gradient 0, (n,)."""
    ratio = log_ratio.exp()
    above = (advantages > 0) & (ratio > 1.0 + high)
    below = (advantages < 0) & (ratio < 1.0 - low)
    return above | below


def clipped_value(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2), (n,); V_old is the value at rollout."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - returns).square())


def preference_margin(
    policy: Tensor, reference: Tensor, trainable: Tensor, row: Tensor, rows: int, *, average: bool = False
) -> Tensor:
    """h = log-ratio of the chosen row minus that of the rejected row after it, each a sum (or mean), (rows / 2,)."""
    difference = policy - reference
    if average:
        ratio = row_mean(difference, trainable, row, rows).view(-1, 2)
    else:
        ratio = row_sum(difference * trainable, row, rows).view(-1, 2)
    return ratio[:, 0] - ratio[:, 1]


def dpo_sigmoid(h: Tensor, *, beta: float, smoothing: float = 0.0) -> Tensor:
    """-(1 - s) log sigma(beta h) - s log sigma(-beta h), (p,). Rafailov et al. 2023, https://arxiv.org/abs/2305.18290,
    eq. 7; s > 0 is cDPO (Mitchell 2023): labels are flipped with probability s."""
    return -(1.0 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h)


def dpo_robust(h: Tensor, *, beta: float, smoothing: float) -> Tensor:
    """((1-s)(-log sigma(beta h)) - s (-log sigma(-beta h))) / (1 - 2s), (p,): unbiased under flips with probability s.
    Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409, eq. 10."""
    clean, flipped = -logsigmoid(beta * h), -logsigmoid(-beta * h)
    return ((1.0 - smoothing) * clean - smoothing * flipped) / (1.0 - 2.0 * smoothing)


def ipo(h: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2, (p,), on summed log-ratios. Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17."""
    return (h - 1.0 / (2.0 * beta)).square()


def dpo_hinge(h: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - beta h), (p,). SLiC, Zhao et al. 2023, https://arxiv.org/abs/2305.10425."""
    return torch.relu(1.0 - beta * h)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, centring: float = 0.0) -> Tensor:
    """-log sigma(r_c - r_r - margin) + c (r_c + r_r)^2, (p,), with c = `centring`.

    Bradley and Terry 1952; margin: Llama 2, https://arxiv.org/abs/2307.09288, eq. 2; centring: Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244.
    """
    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()


def kto_reference_point(ratio: Tensor, there: Tensor) -> Tensor:
    """z0 = max(0, mean of `ratio` where `there` is true), shape (); 0 if it is true nowhere. `ratio` (p,): log-ratios
    of policy to reference, each summed over a row that joins a prompt with an answer to another prompt.

    z0 estimates the KL: a good answer's log-ratio should exceed it, a bad one's should be below it."""
    return ((ratio * there).sum() / there.sum().clamp(min=1)).clamp(min=0.0)


def kto(side: Tensor, *, beta: float) -> Tensor:
    """1 - sigma(beta side), (r,): `side` is r - z0 for a good answer, z0 - r for a bad one, r its summed log-ratio.

    The loss saturates at 0 and 1: an answer far on either side has almost no gradient. Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306, eq. 8, before lambda.
    """
    return torch.sigmoid(-beta * side)


CERTAIN = -1e-6
"""Upper limit of a mean log-prob in `log_odds`: at 0 the odds would be infinite."""


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= CERTAIN, element by element, without loss of digits at either end. Mächler 2012,
    "Accurately computing log(1 - exp(-|a|))"."""
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def log_odds(mean: Tensor) -> Tensor:
    """log p - log(1 - p) for p = exp(mean), (r,); `mean` (r,) is a row's mean log-prob, clamped to at most CERTAIN.

    Above CERTAIN the gradient is that at CERTAIN, large but finite: the policy can still move away from a sure answer.
    """
    held = mean + (mean.clamp(max=CERTAIN) - mean).detach()
    return held - log1mexp(held)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(log odds of chosen - log odds of rejected), (p,), from mean log-probs. Hong et al. 2024,
    https://arxiv.org/abs/2403.07691, eq. 7."""
    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo(scaled: Tensor, *, target_margin: float) -> Tensor:
    """-log sigma(scaled - gamma), (p,); `scaled` is beta (mean_c - mean_r) of mean log-probs. Meng et al. 2024,
    https://arxiv.org/abs/2405.14734, eq. 6."""
    return -logsigmoid(scaled - target_margin)
