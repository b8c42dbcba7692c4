"""Pieces of the decoder with their backward passes written out: less is kept and memory passed fewer times than under
autograd's own.

On the CPU they work in blocks that stay in its cache. Left out: kernels of our own, and what torch fuses well already
(norms, attention, the optimizer).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from assent.maths.invariant import BLOCK


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016), x of any shape.

    1/2 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). A sigmoid takes the CPU a tenth of a tanh.
    """
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    return _GeluTanh.apply(x.contiguous())  # type: ignore[no-any-return, no-untyped-call]


def swiglu(hidden: Tensor) -> Tensor:
    """silu(gate) * up for hidden = (gate, up) side by side, (tokens, 2 width) -> (tokens, width). Shazeer 2020,
    https://arxiv.org/abs/2002.05202."""
    if hidden.device.type == "cpu" and hidden.dtype.itemsize < 4:  # half of a row is slow to write in bfloat16 there
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _Swiglu.apply(hidden)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467. Torch has one kernel for it on CUDA, and a dozen passes over memory on the CPU."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.numel() <= BLOCK and not torch.is_grad_enabled():  # of a step of decoding, calls are a large part
        wide = _wide(x.dtype)
        return _normal(x.to(wide), weight.to(wide), eps)[0].to(x.dtype)
    flat = _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps)  # type: ignore[no-untyped-call]
    return flat.view(x.shape)  # type: ignore[no-any-return]


def attention_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """softmax(query key.T / sqrt(dim) + mask) value for (rows, heads, length, dim); `mask` (length, length) in float32
    is 0 where a query sees a key, and else -inf. The probabilities are kept: for short sequences."""
    return _Products.apply(query, key, value, mask)  # type: ignore[no-any-return, no-untyped-call]


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens], (tokens, width). On the CPU the gradient of a low precision is added up in float32: torch adds in
    the weight's own there, where a frequent token's later occurrences are lost."""
    if weight.device.type == "cpu" and weight.dtype.itemsize < 4:
        return _Embed.apply(tokens, weight)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(tokens, weight)


class _GeluTanh(torch.autograd.Function):
    """Keeps the slope at x and not x: the backward pass is one product."""

    SLOPE = 1.5957691216057308  # 2 sqrt(2 / pi)
    CUBE = 0.044715 * SLOPE

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        slopes: Iterable[Tensor | None] = itertools.repeat(None) if slope is None else _blocks(slope)
        for x_part, y_part, slope_part in zip(_blocks(x), _blocks(y), slopes, strict=False):
            _GeluTanh.block(x_part, y_part, slope_part)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def block(x: Tensor, y: Tensor, slope: Tensor | None) -> None:
        """With z = a x + b x^3 and s = sigmoid(z): y = x s, slope = s + x s (1 - s) (a + 3 b x^2), where
        x (a + 3 b x^2) = 3 (z - 2/3 a x)."""
        x = x.to(_wide(x.dtype))
        z = torch.addcmul(torch.tensor(_GeluTanh.SLOPE, dtype=x.dtype), x, x, value=_GeluTanh.CUBE).mul_(x)
        s = z.sigmoid()
        y.copy_(x * s)
        if slope is not None:
            third = torch.ops.aten.sigmoid_backward(z.add_(x, alpha=-2.0 / 3.0 * _GeluTanh.SLOPE), s)
            slope.copy_(s.add_(third, alpha=3.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return grad * slope


class _Swiglu(torch.autograd.Function):
    """Keeps its input alone, and writes its gradient into one tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        gate, up = hidden.chunk(2, dim=-1)
        result = torch.empty_like(hidden)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result


class _Products(torch.autograd.Function):
    """Matrix products in the tensors' own precision, the softmax in float32 at least."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        length, dim = query.shape[-2:]
        q, k, v = (x.reshape(-1, length, dim) for x in (query, key, value))
        scores = torch.bmm(q, k.mT).to(_wide(q.dtype))  # (rows * heads, length, length)
        # Added, not filled in: filling takes eight times as long.
        p = torch.softmax(torch.add(mask.to(scores.dtype), scores, alpha=dim**-0.5), dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        above = grad.reshape(v.shape)
        wide = _wide(p.dtype)
        slope = torch._softmax_backward_data(torch.bmm(above, v.mT).to(wide), p.to(wide), -1, wide)
        slope = slope.mul_(q.shape[-1] ** -0.5).to(p.dtype)
        of_query, of_key, of_value = torch.bmm(slope, k), torch.bmm(slope.mT, q), torch.bmm(p.mT, above)
        return of_query.view(grad.shape), of_key.view(grad.shape), of_value.view(grad.shape), None


def _normal(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., width) scaled and weighed, and by what each row was scaled, (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x.dtype)
        y = torch.empty_like(x)
        scale = torch.empty(x.shape[0], 1, dtype=wide)
        weight_wide = weight.to(wide)
        for part, out, factor in _row_blocks(x, y, scale):
            normal, found = _normal(part.to(wide), weight_wide, eps)
            factor.copy_(found)
            out.copy_(normal)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x scale and g = grad weight: scale (g - n mean(g n)); the weight gets the sum of grad n."""
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(weight.shape, dtype=scale.dtype)
        weight_wide = weight.to(scale.dtype)
        for part, above, out, factor in _row_blocks(x, grad, grad_x, scale):
            normal = part.to(scale.dtype) * factor
            above = above.to(scale.dtype)
            grad_weight += (above * normal).sum(0)
            above = above * weight_wide
            mean = torch.linalg.vecdot(above, normal).div_(x.shape[1])
            out.copy_(above.addcmul_(normal, mean[:, None], value=-1.0).mul_(factor))
        return grad_x, grad_weight.to(weight.dtype), None


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
        return None, total.index_add_(0, tokens, grad.float()).to(grad.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in: float32 at least."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _blocks(x: Tensor) -> Sequence[Tensor]:
    """Runs of the entries of a contiguous x."""
    return torch.split(x.view(-1), BLOCK * torch.get_num_threads())


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Runs of rows, the same of all tensors (n, ...); the first says how many."""
    rows = max(1, BLOCK * torch.get_num_threads() // tensors[0].shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
