"""KL estimators and the controller of their coefficient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.maths.kl import ESTIMATORS, adapted_coefficient, k1, k2, k3, weighted_k3

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
# KL(policy || reference) = 0.5 ln 2.5 + 0.3 ln 1.5 + 0.2 ln (1/3) = 0.458145 + 0.121640 - 0.219722
EXACT = 0.360063


def test_estimators_by_hand() -> None:
    d = torch.tensor([0.0, 1.0, -1.0])
    assert k1(d).tolist() == [0.0, 1.0, -1.0]
    assert k2(d).tolist() == [0.0, 0.5, 0.5]
    torch.testing.assert_close(k3(d), torch.tensor([0.0, 0.367879, 0.718282]))  # e^-1 - 1 + 1, e - 1 - 1
    assert {"k1": k1, "k2": k2, "k3": k3} == ESTIMATORS


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    d = POLICY.log() - REFERENCE.log()
    assert float((POLICY * ESTIMATORS[name](d)).sum()) == pytest.approx(EXACT, abs=1e-6)


@given(st.floats(-20.0, 20.0, width=32))
def test_k3_is_never_negative(d: float) -> None:
    assert float(k3(torch.tensor(d))) >= -1e-7 * abs(d)


def test_k3_is_exact_near_zero_in_float32() -> None:
    # d^2 / 2 = 5e-9, far below float32's rounding of exp(-d) near 1 (6e-8).
    assert float(k3(torch.tensor(1e-4))) == pytest.approx(5e-9, rel=0.01)


def expected_gradient(name: str) -> torch.Tensor:
    """E_pi of the estimator's gradient, as a loss on samples of the policy would have it."""
    logits = POLICY.log().clone().requires_grad_()
    d = torch.log_softmax(logits, 0) - REFERENCE.log()
    (POLICY * ESTIMATORS[name](d)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_in_a_loss_k1_pulls_nowhere_k2_as_the_kl_and_k3_as_the_kl_the_other_way_round() -> None:
    logits = POLICY.log().clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    reverse = torch.autograd.grad((logp.exp() * (logp - REFERENCE.log())).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((REFERENCE * (REFERENCE.log() - logp)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2"), reverse)
    torch.testing.assert_close(expected_gradient("k3"), forward)


def test_weighted_k3_by_hand() -> None:
    # rho 2, d 1: 2 (e^-1 - 1 + 1) = 0.735759; its derivative in log pi is rho d = 2, as that of rho_detached k2.
    logp = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    value = weighted_k3(logp + 2.0, logp + 1.0 + torch.tensor(2.0).double().log())
    assert value.item() == pytest.approx(0.735759, abs=1e-6)
    assert torch.autograd.grad(value, logp)[0].item() == pytest.approx(2.0)


def test_adaptive_coefficient_by_hand() -> None:
    def adapted(kl: float) -> float:
        return adapted_coefficient(0.1, kl, target=6.0, horizon=10_000, sequences=256)

    assert adapted(12.0) == pytest.approx(0.100512)  # error 1, clipped to 0.2: 0.1 * (1 + 0.2 * 0.0256)
    assert adapted(3.0) == pytest.approx(0.099488)  # error -0.5, clipped to -0.2
    assert adapted(6.6) == pytest.approx(0.100256)  # error 0.1
    assert adapted(6.0) == pytest.approx(0.1)


def test_no_step_takes_the_adaptive_coefficient_below_0() -> None:
    def adapted(kl: float, sequences: int) -> float:
        return adapted_coefficient(0.1, kl, target=6.0, horizon=100.0, sequences=sequences)

    assert adapted(0.0, 100) == pytest.approx(0.08)
    assert adapted(0.0, 1024) == pytest.approx(0.08)  # not 0.1 * (1 - 0.2 * 10.24)
    assert adapted(60.0, 1024) == pytest.approx(0.12)
