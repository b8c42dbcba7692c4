"""A linear layer whose float32 products, forwards and backwards, are oneDNN's.

PyTorch sends float32 products to MKL, which uses half of the registers' width on AMD processors. Left out: bfloat16,
which PyTorch gives to oneDNN itself, and other devices.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

AVAILABLE = (
    platform.machine().lower() in ("x86_64", "amd64")
    and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def trained_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, width) times weight.T plus bias, (rows, out)."""
    fits = x.dim() == 2 and min(x.shape) > 0 and x.dtype == weight.dtype == torch.float32
    if AVAILABLE and fits and x.device.type == "cpu":
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, weight, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (n, k) times b.T (k, m)."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.T) if for_x else None,
            _product(grad.T, x.T) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )
