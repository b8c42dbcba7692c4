"""A trained linear layer beside torch's own, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from assent.maths.products import trained_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 32, 64), (130, 64, 33), (0, 4, 4)], ids=str)
def test_it_is_torchs_linear_in_value_and_gradient(
    shape: tuple[int, int, int], biased: bool, dtype: torch.dtype
) -> None:
    rows, width, out = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, width), (out, width), (out,), (rows, out))
    x, weight, bias, above = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    leaves = [x.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if biased else [])]
    ours, theirs = (layer(x, weight, bias if biased else None) for layer in (trained_linear, F.linear))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(y, leaves, above) for y in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3)
    y = trained_linear(x, weight, None)
    y.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 3))
