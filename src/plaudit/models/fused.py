"""Elementwise pieces of the decoder, with gradients: by kernels of our own on the CPU (`kernels/`), each in one pass
over memory, and by torch elsewhere.

In low precision the kernels compute in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plaudit.kernels.library import number, run, usable
from plaudit.maths.invariant import entrywise

TWICE = 1.5957691216057308  # 2 sqrt(2 / pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016), x (rows, width).

    1/2 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). A sigmoid takes the CPU a tenth of a tanh.
    """
    if usable(x):
        return _GeluTanh.apply(x.contiguous())  # type: ignore[no-any-return, no-untyped-call]
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    wide = x.float() if x.dtype.itemsize < 4 else x
    return entrywise(lambda part: part * torch.sigmoid(TWICE * part * (1.0 + 0.044715 * part * part)), wide).to(x.dtype)


def swiglu(hidden: Tensor) -> Tensor:
    """silu(gate) * up for hidden = (gate, up) side by side, (rows, 2 width) -> (rows, width). Shazeer 2020,
    https://arxiv.org/abs/2002.05202."""
    if usable(hidden):
        return _Swiglu.apply(hidden.contiguous())  # type: ignore[no-any-return, no-untyped-call]
    return entrywise(_swiglu, hidden)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467. Torch has one kernel for it on CUDA, and a dozen passes over memory on the CPU."""
    if not usable(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # heads of which there is one lie apart
    flat = _RmsNorm.apply(flat, weight.contiguous(), eps)  # type: ignore[no-untyped-call]
    return flat.view(x.shape)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + dim/2) of x (tokens, heads, dim) by the angles of cos and sin (tokens, 1, dim/2)."""
    if usable(x, cos, sin) and x.stride(1) == x.shape[2]:
        return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens], (tokens, width). On the CPU the gradient of a low precision is added up in float32: torch adds in
    the weight's own there, where a frequent token's later occurrences are lost."""
    if weight.device.type == "cpu" and weight.dtype.itemsize < 4:
        return _Embed.apply(tokens, weight)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(tokens, weight)


def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


class _GeluTanh(torch.autograd.Function):
    """Keeps the slope at x and not x: the backward pass is one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        run("gelu", x.dtype, x.numel(), x, y, slope, torch.get_num_threads())
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return grad * slope


class _Swiglu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        rows, width = hidden.shape[0], hidden.shape[1] // 2
        ctx.save_for_backward(hidden)
        out = hidden.new_empty(rows, width)
        run("swiglu", hidden.dtype, rows, width, hidden, out, torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(hidden)
        run("swiglu_back", hidden.dtype, *grad.shape, hidden, grad, out, torch.get_num_threads())
        return out


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        scales = x.new_empty(x.shape[0], dtype=torch.float32) if any(ctx.needs_input_grad) else None
        small = torch.tensor(eps, dtype=torch.float32, device="cpu")
        run("rms_norm", x.dtype, *x.shape, x, weight, small, y, scales, torch.get_num_threads())
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        of_x, parts = torch.empty_like(x), scales.new_empty(number("parts_of_sums"), x.shape[1])
        run("rms_norm_back", x.dtype, *x.shape, x, weight, scales, grad, of_x, parts, torch.get_num_threads())
        return of_x, parts[0].clone(), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _Rotate.turned(x, cos, sin, back=False)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
        out = x.new_empty(x.shape)
        run("rotate", x.dtype, *x.shape, x, x.stride(0), cos, sin, out, back, torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The rotation back: its transpose."""
        return _Rotate.turned(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, grad.shape[1], dtype=torch.float32, device=grad.device)
        return None, total.index_add_(0, tokens, grad.float())
