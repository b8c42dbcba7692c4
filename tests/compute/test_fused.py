"""Pieces with a backward pass of their own, beside torch's and by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plaudit.compute.fused import activate, embed, rms_norm, rotate, swiglu


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3).to(dtype)


GELU_TANH, GELU, SILU = (partial(activate, name=name) for name in ("gelu_tanh", "gelu", "silu"))


@pytest.mark.usefixtures("either_way")
def test_activations_by_hand() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 40.0, -40.0])
    # 1/2 * 1 * (1 + tanh(sqrt(2/pi) * 1.044715)) = 1/2 (1 + tanh(0.833563)) = 0.841192
    expected = torch.tensor([0.0, 0.841192, 0.841192 - 1, 40.0, 0.0])
    torch.testing.assert_close(GELU_TANH(x), expected, atol=1e-6, rtol=0)
    # 84.1345 % of a normal distribution lie below 1; sigmoid(1) = 0.731059
    torch.testing.assert_close(GELU(x), torch.tensor([0.0, 0.841345, 0.841345 - 1, 40.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(SILU(x), torch.tensor([0.0, 0.731059, 0.731059 - 1, 40.0, 0.0]), atol=1e-6, rtol=0)
    assert activate(x, "relu").tolist() == [0.0, 1.0, 0.0, 40.0, 0.0]


def test_exact_gelu_in_its_tails(kernels: None) -> None:
    """Where 1 + erf has lost its digits: relative to the result, down to 1e-38."""
    x = torch.linspace(-12.5, 12.5, 100_001)
    wide = x.double()
    expected = wide * torch.special.erfc(-wide / math.sqrt(2)) / 2
    torch.testing.assert_close(GELU(x).double(), expected, rtol=2e-5, atol=0)
    middle = x.abs() < 4
    torch.testing.assert_close(GELU(x[middle]).double(), expected[middle], rtol=2e-6, atol=0)
    for number in (float("nan"), float("inf")):
        torch.testing.assert_close(GELU(torch.tensor([number])), torch.tensor([number]), equal_nan=True)


COS, SIN = (function(torch.arange(40.0).view(8, 1, 5)) for function in (torch.cos, torch.sin))
PIECES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gelu_tanh": (GELU_TANH, lambda x: F.gelu(x, approximate="tanh"), [(7, 33)]),
    "gelu": (GELU, F.gelu, [(7, 33)]),
    "silu": (SILU, F.silu, [(5, 21)]),
    "swiglu": (swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [(9, 46)]),
    "rms_norm": (lambda x, w: rms_norm(x, w, 0.1), lambda x, w: F.rms_norm(x, (21,), w, 0.1), [(100, 21), (21,)]),
    "rms_norm of heads": (
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w,
        [(3, 2, 10), (10,)],
    ),
    "rotate": (
        lambda x: rotate(x, COS.to(x.dtype), SIN.to(x.dtype)),
        # As complex numbers: (a + ib) e^(i angle)
        lambda x: (
            torch.view_as_real(torch.complex(*x.chunk(2, -1)) * torch.complex(COS.double(), SIN.double()))
            .transpose(-1, -2)
            .flatten(-2)
        ),
        [(8, 3, 10)],
    ),
}  # ours, in float64 by torch, shapes of what they take


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_and_its_gradients_are_torchs_in_float64(piece: str, dtype: torch.dtype) -> None:
    ours, theirs, shapes = PIECES[piece]
    inputs = [spread(*shape).roll(n).to(dtype).requires_grad_() for n, shape in enumerate(shapes)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = ours(*inputs), theirs(*wide)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    above = spread(*expected.shape).flip(0).to(dtype)
    mine = torch.autograd.grad(found, inputs, above)
    others = torch.autograd.grad(expected, wide, above.double())
    # bfloat16 has 8 bits; torch's own operations round more than once.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-4}
    for one, other in ((found, expected), *zip(mine, others, strict=True)):
        torch.testing.assert_close(one.double(), other, **close)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), found, rtol=1e-6, atol=1e-6)


def test_rms_norm_by_hand() -> None:
    # The mean of (9, 16) is 12.5: 3 / sqrt(12.5) = 0.848528, 4 / sqrt(12.5) = 1.131371, times 1 and 2
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.848528, 2.262742]]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "piece", [lambda x: rms_norm(x, torch.ones(64, dtype=x.dtype), 1e-5), GELU_TANH, GELU, SILU, swiglu]
)
def test_in_bfloat16_the_result_is_float32s_rounded(piece: object) -> None:
    assert callable(piece)
    x = spread(16, 64, dtype=torch.bfloat16)
    expected = piece(x.float())
    got = piece(x)
    assert got.dtype == torch.bfloat16
    # swiglu rounds silu before the product: two roundings of 2^-9 at most
    torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=1e-30)


@pytest.mark.usefixtures("either_way")
def test_rms_norm_of_one_head_among_others() -> None:
    """A key head cut out of what a projection leaves."""
    whole, weight = spread(5, 24), spread(8)
    head = whole[:, 8:16].view(5, 1, 8)
    torch.testing.assert_close(rms_norm(head, weight, 1e-5), rms_norm(head.clone(), weight, 1e-5), rtol=0, atol=0)


def test_a_frequent_tokens_gradient_is_whole_in_bfloat16() -> None:
    """600 ones: added up in bfloat16 they would stay at 256, where 1 is less than half of the last place."""
    weight = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.tensor([1] * 600 + [2])
    out = embed(tokens, weight)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0, 0.0], [600.0, 600.0], [1.0, 1.0]]
