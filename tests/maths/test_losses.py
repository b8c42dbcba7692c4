"""Losses: numbers by hand, where the gradient is and is not, and what each one's optimum is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plaudit.maths.losses import (
    bradley_terry,
    cispo,
    clip_fraction,
    clipped_policy,
    clipped_value,
    dpo_hinge,
    dpo_robust,
    dpo_sigmoid,
    ipo,
    log_ratio,
    off_policy_weight,
    preference_margin,
)


def close(got: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=tolerance, rtol=0)


def policy(ratio: list[float], advantages: list[float], *, dual: float | None = None) -> tuple[Tensor, Tensor]:
    """Loss and d loss / d log-ratio with the clip at [0.8, 1.3]."""
    change = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    loss = clipped_policy(change, torch.tensor(advantages, dtype=torch.float64), low=0.2, high=0.3, dual=dual)
    loss.sum().backward()
    assert change.grad is not None
    return loss.detach(), change.grad


def test_log_ratio_levels_by_hand() -> None:
    # Rows: prompt a b | prompt a; the difference is 0.1, 0.3 and -0.5. Prompt tokens never count.
    trainable = torch.tensor([False, True, True, False, True])
    row = torch.tensor([0, 0, 0, 1, 1])
    current = torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0])
    old = torch.tensor([4.0, -1.1, -2.3, 4.0, -2.5])

    def at(level: str) -> Tensor:
        return log_ratio(current, old, trainable, row, 2, level=level)

    close(at("token"), [0.0, 0.1, 0.3, 0.0, -0.5])
    close(at("sequence"), [0.0, 0.4, 0.4, 0.0, -0.5])
    close(at("geometric"), [0.0, 0.2, 0.2, 0.0, -0.5])


def test_clipped_policy_by_hand() -> None:
    # A > 0: -A min(rho, 1.3). A < 0: -A max(rho, 0.8).
    loss, _ = policy([1.0, 1.5, 0.5, 1.0, 1.5, 0.5], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    close(loss, [-2.0, -2.6, -1.0, 1.0, 1.5, 0.8])


def test_the_clip_takes_the_gradient_of_going_further_and_never_that_of_coming_back() -> None:
    _, gradient = policy([1.5, 0.5, 1.5, 0.5], [2.0, -1.0, -1.0, 2.0])
    # Further: 0. Back: d(-A rho)/d log rho = -A rho = 1 * 1.5 and -2 * 0.5. Descent lowers the one, raises the other.
    close(gradient, [0.0, 0.0, 1.5, -1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_overflows_gives_what_the_clip_gives(dtype: torch.dtype) -> None:
    """exp(800) is beyond both types. A = 0: nothing. A > 0: -1.3 A. A < 0 is endless, unless the dual clip ends it."""
    for change, finite in ((800.0, False), (80.0, True)):
        for dual in (None, 3.0):
            log_ratio = torch.full((4,), change, dtype=dtype, requires_grad=True)
            advantages = torch.tensor([0.0, -0.0, 2.0, -2.0], dtype=dtype)
            loss = clipped_policy(log_ratio, advantages, low=0.2, high=0.3, dual=dual)
            loss.sum().backward()
            assert log_ratio.grad is not None
            close(loss.detach()[:3], [0.0, 0.0, -2.6])
            close(log_ratio.grad[:3], [0.0, 0.0, 0.0])
            if dual is not None:
                assert (float(loss[3].detach()), float(log_ratio.grad[3])) == (6.0, 0.0)
            else:
                assert bool(loss[3].isfinite()) == finite
                assert float(loss[3].detach()) > 1e34


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-3, 3)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 3),
    st.none() | st.floats(1, 4),
)
def test_clipped_policy_is_its_formula(
    pairs: list[tuple[float, float]], low: float, high: float, dual: float | None
) -> None:
    change, advantages = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = []
    for x, a in pairs:
        rho = math.exp(x)
        loss = max(-a * rho, -a * min(max(rho, 1 - low), 1 + high))
        expected.append(min(loss, -dual * a) if dual is not None and a < 0 else loss)
    close(clipped_policy(change, advantages, low=low, high=high, dual=dual), expected, 1e-9)


def test_at_the_start_the_gradient_is_minus_the_advantage() -> None:
    _, gradient = policy([1.0, 1.0], [2.0, -3.0])
    close(gradient, [-2.0, 3.0])


def test_dual_clip_bounds_the_loss_of_bad_actions_alone() -> None:
    loss, gradient = policy([5.0, 5.0, 2.0, 0.5], [-1.0, 1.0, -1.0, -1.0], dual=3.0)
    # A < 0, rho 5: min(5, 3 * 1), no gradient. A > 0: -1.3 as ever. rho 2: below the bound. rho 0.5: 0.8, no gradient.
    close(loss, [3.0, -1.3, 2.0, 0.8])
    close(gradient, [0.0, 0.0, 2.0, 0.0])


@given(st.floats(0.05, 5.0), st.floats(-3.0, 3.0))
def test_clip_fraction_counts_exactly_the_lost_gradients(ratio: float, advantage: float) -> None:
    if min(abs(ratio - 0.8), abs(ratio - 1.3), abs(advantage)) < 1e-3:
        return
    _, gradient = policy([ratio], [advantage])
    counted = clip_fraction(torch.tensor([ratio]).log(), torch.tensor([advantage]), low=0.2, high=0.3)
    assert bool(counted) == (float(gradient) == 0.0)
    nothing = clip_fraction(torch.tensor([ratio]).log(), torch.zeros(1), low=0.2, high=0.3)
    assert not nothing.any(), "without an advantage there is no gradient to lose"


def test_cispo_by_hand_keeps_every_gradient() -> None:
    """Ratios 0.5, 1, 3 and 3 with the cap at 2: weights 0.5, 1, 2, 2, whatever the advantage's sign."""
    current = torch.tensor([-1.0, -2.0, -0.5, -4.0], dtype=torch.float64, requires_grad=True)
    old = current.detach() - torch.tensor([0.5, 1.0, 3.0, 3.0], dtype=torch.float64).log()
    loss = cispo(current - old, current, torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64), cap=2.0)
    close(loss.detach(), [0.5, -2.0, 2.0, -16.0])
    (gradient,) = torch.autograd.grad(loss.sum(), current)
    close(gradient, [-0.5, 1.0, -4.0, 4.0])


@given(st.floats(0.05, 5.0), st.floats(-3.0, 3.0))
def test_the_clipped_loss_is_the_pessimistic_one(ratio: float, advantage: float) -> None:
    assert float(policy([ratio], [advantage])[0]) >= -advantage * ratio - 1e-9


def test_clipped_value_by_hand() -> None:
    # eps 0.2. V 1, V_old 0.5, R 0: max(1, 0.7^2) / 2. V 0.6, V_old 1, R 0.5: max(0.1^2, 0.3^2) / 2, the held one.
    values = torch.tensor([1.0, 0.6], requires_grad=True)
    loss = clipped_value(values, torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.5]), clip=0.2)
    close(loss.detach(), [0.5, 0.045])
    loss.sum().backward()
    assert values.grad is not None
    close(values.grad, [1.0, 0.0])  # V - R, and nothing where the held value is the worse one
    close(clipped_value(torch.tensor([0.6]), torch.tensor([1.0]), torch.tensor([0.5]), clip=None), [0.005])


def test_preference_margin_by_hand() -> None:
    # Chosen: -1 - 2 against -1.5 - 2.5, ratio 1. Rejected: -3 against -2, ratio -1. h = 2.
    trainable = torch.tensor([False, True, True, False, True])
    row = torch.tensor([0, 0, 0, 1, 1])
    now = torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0])
    reference = torch.tensor([1.0, -1.5, -2.5, 2.0, -2.0])
    close(preference_margin(now, reference, trainable, row, 2), [2.0])
    close(preference_margin(now, reference, trainable, row, 2, average=True), [1.5])  # 1 / 2 - (-1) / 1
    swapped = preference_margin(
        torch.tensor([9.0, -3.0, 9.0, -1.0, -2.0]),
        torch.tensor([2.0, -2.0, 1.0, -1.5, -2.5]),
        torch.tensor([False, True, False, True, True]),
        torch.tensor([0, 0, 1, 1, 1]),
        2,
    )
    close(swapped, [-2.0])


def test_preference_losses_by_hand() -> None:
    h = torch.tensor([2.0, -2.0], dtype=torch.float64)
    # beta h = 1 and -1: -log sigma(1) = 0.313262, -log sigma(-1) = 1.313262
    close(dpo_sigmoid(h, beta=0.5), [0.313262, 1.313262])
    close(dpo_sigmoid(h, beta=0.5, smoothing=0.1), [0.413262, 1.213262])  # 0.9 * 0.313262 + 0.1 * 1.313262
    close(dpo_robust(h, beta=0.5, smoothing=0.1), [0.188262, 1.438262])  # (0.281936 - 0.131326) / 0.8
    close(dpo_hinge(h, beta=0.25), [0.5, 1.5])
    close(dpo_hinge(h, beta=1.0), [0.0, 3.0])
    close(ipo(h, beta=0.5), [1.0, 9.0])  # (2 - 1)^2, (-2 - 1)^2


def test_at_the_reference_every_preference_loss_has_its_known_start() -> None:
    h = torch.zeros(1, dtype=torch.float64)
    log2 = math.log(2)
    for start, expected in (
        (dpo_sigmoid(h, beta=0.1), log2),
        (dpo_sigmoid(h, beta=0.1, smoothing=0.2), log2),
        (dpo_robust(h, beta=0.1, smoothing=0.2), log2),
        (dpo_hinge(h, beta=0.1), 1.0),
        (ipo(h, beta=0.1), 25.0),  # (0 - 5)^2
    ):
        assert float(start) == pytest.approx(expected)


@given(st.floats(-30.0, 30.0), st.floats(0.01, 2.0), st.floats(0.01, 0.45))
def test_robust_dpo_is_the_clean_loss_in_the_mean_over_flips(h: float, beta: float, smoothing: float) -> None:
    here, flipped = torch.tensor([h], dtype=torch.float64), torch.tensor([-h], dtype=torch.float64)
    mean = (1 - smoothing) * dpo_robust(here, beta=beta, smoothing=smoothing)
    mean = mean + smoothing * dpo_robust(flipped, beta=beta, smoothing=smoothing)
    torch.testing.assert_close(mean, dpo_sigmoid(here, beta=beta))


@given(st.floats(0.05, 2.0))
def test_optima(beta: float) -> None:
    def slope(loss: str, h: float) -> float:
        at = torch.tensor([h], dtype=torch.float64, requires_grad=True)
        value = {
            "ipo": lambda: ipo(at, beta=beta),
            "sigmoid": lambda: dpo_sigmoid(at, beta=beta),
            "smoothed": lambda: dpo_sigmoid(at, beta=beta, smoothing=0.2),
        }[loss]()
        return float(torch.autograd.grad(value.sum(), at)[0])

    best = 1 / (2 * beta)
    assert slope("ipo", best) == pytest.approx(0.0, abs=1e-9)
    assert slope("ipo", best - 0.1) < 0 < slope("ipo", best + 0.1)
    assert slope("sigmoid", 0.0) == pytest.approx(-beta / 2)  # prefers the chosen ever more
    best = math.log(0.8 / 0.2) / beta  # sigma(beta h) = 1 - s
    assert slope("smoothed", best) == pytest.approx(0.0, abs=1e-9)


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64)
    none, half = torch.zeros(2, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    close(bradley_terry(chosen, rejected, none), [0.313262, 1.313262])
    close(bradley_terry(chosen, rejected, half), [0.474077, 1.701413])  # -log sigma(0.5), -log sigma(-1.5)
    close(bradley_terry(chosen, rejected, none, centring=0.01), [0.323262, 1.403262])  # + 0.01 * 1, + 0.01 * 9


def test_a_margin_asks_for_more_and_centring_alone_sees_a_common_shift() -> None:
    chosen, rejected, margin = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0])
    assert float(bradley_terry(chosen, rejected, margin)) > float(bradley_terry(chosen, rejected, 0 * margin))
    torch.testing.assert_close(bradley_terry(chosen + 7, rejected + 7, margin), bradley_terry(chosen, rejected, margin))
    assert float(bradley_terry(chosen + 7, rejected + 7, margin, centring=0.1)) > 10.0


def test_off_policy_weights_by_hand() -> None:
    """Two rows of two trained tokens and a prompt token each: ratios 1/2, 3 | 1.5, 1.2, cap 2."""
    trainable = torch.tensor([False, True, True, False, True, True])
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    sampler = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -1.0])
    learner = sampler + torch.tensor([9.0, math.log(0.5), math.log(3.0), -9.0, math.log(1.5), math.log(1.2)])

    def weights(level: str, how: str, cap: float) -> Tensor:
        return off_policy_weight(learner, sampler, trainable, row, 2, level=level, how=how, cap=cap)

    close(weights("token", "truncate", 2.0), [1.0, 0.5, 2.0, 1.0, 1.5, 1.2])
    close(weights("token", "mask", 2.1), [1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    close(weights("token", "mask", 1.4), [1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    # Whole rows: 1/2 * 3 = 1.5 and 1.5 * 1.2 = 1.8.
    close(weights("sequence", "truncate", 1.7), [1.0, 1.5, 1.5, 1.0, 1.7, 1.7])
    close(weights("sequence", "mask", 2.0), [1.0] * 6)
    close(weights("sequence", "mask", 1.7), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    close(weights("sequence", "mask", 1.4), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    # Their geometric means: sqrt(1.5) = 1.2247 and sqrt(1.8) = 1.3416.
    close(weights("geometric", "truncate", 1.3), [1.0, 1.2247449, 1.2247449, 1.0, 1.3, 1.3])
    close(weights("geometric", "mask", 1.3), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])


def test_untruncated_weights_make_the_samplers_mean_the_learners() -> None:
    """sum_x q(x) w(x) f(x) = sum_x p(x) f(x): what the correction is for, on a distribution written out."""
    q, p, f = (torch.rand(5, dtype=torch.float64) for _ in range(3))
    q, p = q / q.sum(), p / p.sum()
    everything, row = torch.ones(5, dtype=torch.bool), torch.arange(5)
    weight = off_policy_weight(p.log(), q.log(), everything, row, 5, level="token", how="truncate", cap=1e9)
    close((q * weight * f).sum()[None], [float((p * f).sum())], 1e-9)
