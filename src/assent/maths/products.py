"""Matrix products by the fastest library that torch carries, with gradients.

On the CPU torch sends float32 products to MKL, which uses half of the registers' width on AMD processors with AVX-512.
oneDNN, which torch asks for bfloat16 alone, uses all of it and takes weights as they lie in memory, transposed ones
too; the products stay float32. `torch.backends.mkldnn.set_flags(False)` sends everything to MKL again, which is the
faster one without AVX-512. x86 processors without it have no products of bfloat16 either, and torch multiplies one
number after another: there the factors are made float32, multiplied, and the result is rounded. Left out: batches of
small products (attention), which torch gives to oneDNN only with leave to round them to bfloat16.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SMALLEST = 1 << 15
"""Entries of a second factor below which calling oneDNN costs more than it saves. The first factor's rows do not count:
a row's result must not depend on how many there are."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, inner) times weight (columns, inner) transposed, plus bias (columns,). Differentiable once."""
    if not (by_onednn(x, weight) or widened(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _plain(x, weight, bias)


def summed_outer_products(first: Tensor, second: Tensor) -> Tensor:
    """first (n, a) transposed times second (n, b): a weight's gradient, (a, b). Not differentiable."""
    if widened(first, second):
        return summed_outer_products(first.float(), second.float()).to(first.dtype)
    if not by_onednn(first, second):
        return first.T @ second
    if first.shape[1] < second.shape[1]:  # oneDNN's first factor is copied if it is transposed: let it be the smaller
        return _onednn(first.T, second.T)
    return _onednn(second.T, first.T).T.contiguous()


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these: plain float32 matrices on an x86 CPU. Tensors that only look like one (those of
    several ranks, fake ones) are left to torch."""
    return (
        weight.numel() >= SMALLEST
        and x.numel() > 0
        and _plain_matrices(torch.float32, x, weight)
        and _wide_registers()
        and onednn_present()
        and bool(torch.backends.mkldnn.enabled)
    )


def widened(x: Tensor, weight: Tensor) -> bool:
    """Whether these are multiplied in float32 though they are bfloat16."""
    return slow_halves() and _plain_matrices(torch.bfloat16, x, weight)


@functools.cache
def onednn_present() -> bool:
    return (
        _x86()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@functools.cache
def slow_halves() -> bool:
    """Whether this processor multiplies bfloat16 one number after another."""
    return _x86() and not (onednn_present() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _wide_registers() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def _x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _plain_matrices(dtype: torch.dtype, *factors: Tensor) -> bool:
    return all(
        type(factor) in (Tensor, nn.Parameter)
        and factor.dtype is dtype
        and factor.device.type == "cpu"
        and factor.ndim == 2
        for factor in factors
    )


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` without gradients."""
    if widened(x, weight):
        return _plain(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return _onednn(x, weight, bias) if by_onednn(x, weight) else F.linear(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _plain(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # sums broadcast theirs
        of_x, of_weight, of_bias = ctx.needs_input_grad
        wide = grad.float() if widened(grad, weight) else grad  # once for both
        return (
            _plain(wide, weight.T.to(wide.dtype), None).to(grad.dtype) if of_x else None,
            summed_outer_products(wide, x.to(wide.dtype)).to(grad.dtype) if of_weight else None,
            wide.sum(0).to(grad.dtype) if of_bias else None,
        )
