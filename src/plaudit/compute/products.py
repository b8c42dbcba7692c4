"""Matrix products, with gradients, by the fastest library that keeps inference batch-invariant.

Float32: on the CPU torch uses MKL. On AMD processors with AVX-512 MKL uses only half of the registers' width; on
Intel's it orders additions by the number of rows, on which a row's result must not depend (`invariant.py`). oneDNN,
which torch uses only for bfloat16, uses the whole width, has one order, and reads weights as they are in memory,
transposed ones too; products stay float32. On AMD processors without AVX-512 MKL is faster. On Intel's, products with
gradients stay with MKL: it is as fast in the forward pass and twice as fast at a weight's gradient.
`torch.backends.mkldnn.set_flags(False)` gives all float32 products to MKL, which gives up invariance on Intel's.

Bfloat16: on processors with matrix registers (AMX), oneDNN's order depends on the number of rows. Products that must be
invariant use Plaudit's own kernel there. x86 processors without AVX-512 have no products of bfloat16, and torch
multiplies one number after another: the factors are made float32, multiplied, and the result is rounded.

Left out: batches of small products (attention), which torch gives to oneDNN only if it may round them to bfloat16.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plaudit.compute.calls import available, run
from plaudit.compute.library import number

X86 = platform.machine().lower() in ("x86_64", "amd64")
"""Evaluated once at import: some versions of torch.compile cannot trace `platform.machine()`."""
SMALLEST = 1 << 15
"""With fewer entries in the second factor, calling oneDNN costs more than it saves. The first factor's rows do not
count, since a row's result must not depend on their number."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, alone: bool = False) -> Tensor:
    """Return x (rows, inner) @ weight (columns, inner).T + bias (columns,). Differentiable once. With `alone`, without
    gradients, a row's result on the CPU does not depend on other rows; the caller pads their number (see
    `invariant.linear`)."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if alone and by_matrices(x, weight, bias):
        return product_by_matrices(x, weight, bias)
    if not (by_onednn(x, weight, alone=alone) or widened(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _plain(x, weight, bias, alone=alone)


def summed_outer_products(first: Tensor, second: Tensor) -> Tensor:
    """Return first (n, a).T @ second (n, b), a weight's gradient (a, b). For bfloat16 the result is float32 where
    factors are widened, else bfloat16. Not differentiable."""
    if widened(first, second):
        return summed_outer_products(first.float(), second.float())
    if not by_onednn(first, second):
        return first.T @ second
    if first.shape[1] < second.shape[1]:  # oneDNN copies a transposed first factor: make it the smaller one
        return _onednn(first.T, second.T)
    return _onednn(second.T, first.T).T.contiguous()


def by_onednn(x: Tensor, weight: Tensor, *, alone: bool = False) -> bool:
    """True if oneDNN should multiply these: plain float32 matrices on an x86 CPU, if it is faster than MKL there, or if
    rows must be computed as if `alone` and MKL would not do so. Tensor subclasses are left to torch."""
    faster = weight.numel() >= SMALLEST and _wide_registers() and not _intel()
    return (
        (faster or (alone and (_wide_registers() or _intel())))
        and weight.numel() > 0
        and x.numel() > 0
        and _plain_matrices(torch.float32, x, weight)
        and onednn_present()
        and bool(torch.backends.mkldnn.enabled)
    )


def by_matrices(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if our own kernel should multiply these: bfloat16 on a processor with matrix registers. Tensors that do not
    fit together are left to torch, which raises the error."""
    return (
        _plain_matrices(torch.bfloat16, x, weight)
        and matrices_present()
        and x.shape[1] == weight.shape[1]
        and (bias is None or (bias.dtype is torch.bfloat16 and bias.shape == weight.shape[:1]))
    )


def product_by_matrices(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `product` with our kernel for tensors that `by_matrices` accepts: no gradients, each row as if alone."""
    x, weight = _even(x), _even(weight).contiguous()
    out = x.new_empty(len(x), len(weight))
    run("product", x, weight, None if bias is None else bias.contiguous(), out)
    return out


def _even(x: Tensor) -> Tensor:
    """Return x contiguous, padded to an even number of columns: the kernel reads pairs of adjacent entries."""
    if x.shape[1] % 2:
        return F.pad(x, (0, 1))
    return x if x.stride(1) == 1 else x.contiguous()


def widened(x: Tensor, weight: Tensor) -> bool:
    """True if these bfloat16 factors should be converted to float32 to be multiplied, which is faster here."""
    return _plain_matrices(torch.bfloat16, x, weight) and slow_halves()


@functools.cache
def onednn_present() -> bool:
    return X86 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def matrices_present() -> bool:
    """True if the processor has matrix registers (AMX) of bfloat16, with which oneDNN's order of additions depends on
    the number of rows, and we have a kernel (by pairs, if the compiler does not know these registers)."""
    if slow_halves() or not available(torch.bfloat16) or not number("pairs_of_halves"):
        return False
    return number("matrices_of_halves") == 1 or torch.cpu._is_amx_tile_supported()


@functools.cache
def slow_halves() -> bool:
    """True if this processor multiplies bfloat16 one number after another."""
    return X86 and not (onednn_present() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _wide_registers() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


@functools.cache
def _intel() -> bool:
    """True if MKL treats this processor as one of Intel's; False if unknown."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "GenuineIntel" in platform.processor()


def _plain_matrices(dtype: torch.dtype, *factors: Tensor) -> bool:
    return all(
        type(factor) in (Tensor, nn.Parameter)
        and factor.dtype is dtype
        and factor.device.type == "cpu"
        and factor.ndim == 2
        for factor in factors
    )


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, *, alone: bool = False) -> Tensor:
    """Compute `product` without gradients, by oneDNN or torch."""
    if widened(x, weight):
        return _plain(x.float(), weight.float(), None if bias is None else bias.float(), alone=alone).to(x.dtype)
    return _onednn(x, weight, bias) if by_onednn(x, weight, alone=alone) else F.linear(x, weight, bias)


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
        grad = grad.contiguous()  # a sum's gradient is an expanded tensor
        of_x, of_weight, of_bias = ctx.needs_input_grad
        wide = grad.float() if widened(grad, weight) else grad  # converted once for both products
        return (
            _plain(wide, weight.T.to(wide.dtype), None).to(grad.dtype) if of_x else None,
            summed_outer_products(wide, x.to(wide.dtype)) if of_weight else None,
            wide.sum(0) if of_bias else None,
        )
