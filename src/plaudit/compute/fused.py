"""Elementwise parts of the decoder, with gradients, in one pass over memory: by our kernels, or on a GPU compiled.

In low precision our kernels compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plaudit.compute.calls import run, usable
from plaudit.compute.compiled import compiled
from plaudit.compute.library import number

ACTIVATIONS = {"relu": 0, "gelu_tanh": 1, "silu": 2, "gelu": 3}
"""Activations and the numbers by which the kernels know them."""
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "gelu": F.gelu,
}


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation to each entry of x: GELU, exact or in its tanh form (Hendrycks and Gimpel 2016,
    https://arxiv.org/abs/1606.08415), SiLU or ReLU."""
    if name != "relu" and usable(x):
        return _Activate.apply(x.contiguous(), name)  # type: ignore[no-any-return, no-untyped-call]
    return PLAIN[name](x)


def swiglu(hidden: Tensor) -> Tensor:
    """Return silu(gate) * up, (rows, width), for hidden (rows, 2 width) with gate and up side by side. Shazeer 2020,
    https://arxiv.org/abs/2002.05202."""
    if usable(hidden):
        return _Swiglu.apply(hidden.contiguous())  # type: ignore[no-any-return, no-untyped-call]
    return _swiglu(hidden)


@compiled
def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467. Torch has one kernel for it on CUDA, and a dozen passes over memory on the CPU."""
    if not usable(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # the rows of a single head are not contiguous
    flat = _RmsNorm.apply(flat, weight.contiguous(), eps)  # type: ignore[no-untyped-call]
    return flat.view(x.shape)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + dim/2) of x (tokens, heads, dim) by the angles of cos and sin (tokens, 1, dim/2)."""
    if usable(x, cos, sin) and x.stride(1) == x.shape[2]:
        return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    return _rotated(x, cos, sin)


@compiled
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return weight[tokens], (tokens, width). On the CPU, gradients of a low-precision weight are summed in float32:
    torch sums them in the weight's precision, where a frequent token's later occurrences are lost."""
    if weight.device.type == "cpu" and weight.dtype.itemsize < 4:
        return _Embed.apply(tokens, weight)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(tokens, weight)


class _Activate(torch.autograd.Function):
    """Save the derivative at x instead of x: the backward pass is one elementwise product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        run("activate", x, y, slope, activation=ACTIVATIONS[name])
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slope: Tensor = ctx.saved_tensors[0]
        return grad * slope, None


class _Swiglu(torch.autograd.Function):
    """Save only the input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        rows, width = hidden.shape[0], hidden.shape[1] // 2
        ctx.save_for_backward(hidden)
        out = hidden.new_empty(rows, width)
        run("swiglu", hidden, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(hidden)
        run("swiglu_back", hidden, grad, out)
        return out


class _RmsNorm(torch.autograd.Function):
    """Save the input, the weight and one number a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        scales = x.new_empty(x.shape[0], dtype=torch.float32) if any(ctx.needs_input_grad) else None
        run("rms_norm", x, weight, y, scales, eps=float(eps))
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad = grad.contiguous()
        of_x, parts = torch.empty_like(x), scales.new_empty(number("parts_of_sums"), x.shape[1])
        run("rms_norm_back", x, weight, scales, grad, of_x, parts)
        return of_x, parts[0].clone(), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _Rotate.turned(x, cos, sin, back=False)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
        out = x.new_empty(x.shape)
        run("rotate", x, cos, sin, out, back=back)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient back: the transpose of a rotation is its inverse."""
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
