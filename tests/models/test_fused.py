"""Pieces with a backward pass of their own, beside torch's and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assent.models import fused
from assent.models.fused import attention_by_products, embed, gelu_tanh, rms_norm, swiglu


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3).to(dtype)


@pytest.fixture(params=[5, 1 << 17], ids=["many blocks", "one block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", request.param)


def test_gelu_by_hand() -> None:
    # 1/2 * 1 * (1 + tanh(sqrt(2/pi) * 1.044715)) = 1/2 (1 + tanh(0.833563)) = 0.841192
    ours = gelu_tanh(torch.tensor([0.0, 1.0, -1.0, 40.0, -40.0]))
    torch.testing.assert_close(ours, torch.tensor([0.0, 0.841192, 0.841192 - 1, 40.0, 0.0]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("blocks")
def test_gelu_is_torchs_in_value_and_gradient() -> None:
    x = spread(7, 33).requires_grad_()
    for take in (gelu_tanh(x), F.gelu(x, approximate="tanh")):
        assert take.shape == x.shape
    ours, theirs = gelu_tanh(x), F.gelu(x, approximate="tanh")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    above = spread(7, 33)
    (mine,), (other,) = torch.autograd.grad(ours, x, above), torch.autograd.grad(theirs, x, above)
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(gelu_tanh(x), ours)


@pytest.mark.usefixtures("blocks")
def test_gradients_are_those_of_finite_differences() -> None:
    x = spread(3, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(gelu_tanh, (x,))
    assert torch.autograd.gradcheck(swiglu, (x,))
    weight = spread(8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: rms_norm(h, w, 0.1), (x, weight))


@pytest.mark.usefixtures("blocks")
def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    hidden = spread(9, 14)
    gate, up = hidden.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(hidden), gate / (1 + (-gate).exp()) * up, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shape", [(6, 10), (3, 2, 10)], ids=str)
def test_rms_norm_is_torchs_in_value_and_gradient(shape: tuple[int, ...]) -> None:
    x, weight = spread(*shape).requires_grad_(), spread(10).requires_grad_()
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, (10,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    above = spread(*reversed(shape)).reshape(shape)
    for mine, other in zip(
        torch.autograd.grad(ours, (x, weight), above), torch.autograd.grad(theirs, (x, weight), above), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_attention_by_products_is_torchs_and_its_gradients_are_those_of_finite_differences() -> None:
    query, key, value = (spread(2, 3, 5, 4, dtype=torch.float64).roll(n).requires_grad_() for n in range(3))
    mask = torch.full((5, 5), float("-inf")).triu(1)
    ours = attention_by_products(query, key, value, mask)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda *x: attention_by_products(*x, mask), (query, key, value))


def test_rms_norm_by_hand() -> None:
    # The mean of (9, 16) is 12.5: 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371, times 1 and 2
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.848528, 2.262742]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("piece", [lambda x: rms_norm(x, torch.ones(64, dtype=x.dtype), 1e-5), gelu_tanh, swiglu])
def test_in_bfloat16_the_result_is_float32s_rounded(piece: object) -> None:
    assert callable(piece)
    x = spread(16, 64, dtype=torch.bfloat16)
    expected = piece(x.float())
    got = piece(x)
    assert got.dtype == torch.bfloat16
    # swiglu rounds silu before the product: two roundings of 2^-9 at most
    torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=1e-30)


def test_a_frequent_tokens_gradient_is_whole_in_bfloat16() -> None:
    """600 ones: added up in bfloat16 they would stay at 256, where 1 is less than half of the last place."""
    weight = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.tensor([1] * 600 + [2])
    out = embed(tokens, weight)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0, 0.0], [600.0, 600.0], [1.0, 1.0]]


def test_sigmoid_form_is_the_tanh_form() -> None:
    """x sigmoid(2u) = x / 2 (1 + tanh u), the identity the CPU's form rests on."""
    for x in (-3.0, -0.5, 0.1, 2.0):
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        assert float(gelu_tanh(torch.tensor([x], dtype=torch.float64))) == pytest.approx(0.5 * x * (1 + math.tanh(u)))
