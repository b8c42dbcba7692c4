"""Log-probs and entropies of chosen tokens directly from hidden states, without the full logits tensor.

Only trained tokens pass the head, in chunks. The backward pass is written by hand, so that autograd keeps no logits. If
tokens times vocabulary is small the probabilities are kept, otherwise they are computed again. On a tensor axis each
rank has rows of the head: a chunk needs one maximum and one sum over ranks, and the states' gradient one sum in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from plaudit.compute.axis import ALONE, Axis
from plaudit.compute.compiled import compiled
from plaudit.compute.invariant import linear
from plaudit.compute.products import by_onednn, product, summed_outer_products

CHUNK_ELEMENTS = 1 << 22
"""Logits computed at once on the CPU; about 16 MB in float32."""
CHUNK_ELEMENTS_DEVICE = 1 << 29
"""Logits computed at once elsewhere, where memory is larger and small products are wasteful; 1 GB in bfloat16."""
LEAST_ROWS = 256
"""The fewest tokens at once: each chunk reads the head and adds to a gradient of its size."""
KEEP_ELEMENTS = 1 << 25
"""Up to this many probabilities are kept for the backward pass (128 MB in float32); beyond it they are recomputed."""


class _ChosenLogprobs(torch.autograd.Function):
    """hidden (n, width), weight (vocab, width), bias (vocab,) or None, targets (n,) -> log-probs, entropies (n,). On a
    tensor axis weight and bias are this rank's rows; all other arguments and the results are equal on its ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        head: Callable[..., Tensor],
        axis: Axis,
    ) -> tuple[Tensor, Tensor]:
        n, vocab = hidden.shape[0], weight.shape[0]
        rows = _chunk_rows(hidden, vocab)
        fused = _fused(hidden, axis)
        keep = not fused and n * vocab <= KEEP_ELEMENTS and any(ctx.needs_input_grad)
        chosen = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy, total = torch.empty_like(chosen), torch.empty_like(chosen)
        probs: list[Tensor] = []
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            logits = head(hidden[part], weight, bias)
            if fused:
                chosen[part], entropy[part], total[part] = _figures(logits, targets[part], temperature)
            elif axis.size > 1:
                p, chosen[part], entropy[part], total[part] = _among(logits, targets[part], temperature, axis)
            else:
                logp = _log_softmax(logits, temperature)
                p = logp.exp()
                chosen[part] = logp.gather(1, targets[part, None])[:, 0]
                entropy[part] = -torch.linalg.vecdot(p, logp)
            if keep:
                probs.append(p)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, total if fused or axis.size > 1 else None, *probs)
        ctx.fused, ctx.rows, ctx.temperature, ctx.head, ctx.axis = fused, rows, temperature, head, axis
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, total, *probs = ctx.saved_tensors
        grad_chosen = torch.zeros_like(entropy) if grad_chosen is None else grad_chosen / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for number, start in enumerate(range(0, hidden.shape[0], ctx.rows)):
            part = slice(start, min(start + ctx.rows, hidden.shape[0]))
            if ctx.fused:
                known = targets[part], entropy[part], total[part], grad_chosen[part]
                logits = ctx.head(hidden[part], weight, bias)
                grad = _slope(logits, ctx.temperature, *known, None if grad_entropy is None else grad_entropy[part])
            else:
                p = probs[number] if probs else _again(ctx, part, hidden, weight, bias, total)
                grad = p * -grad_chosen[part, None]
                if total is None:
                    grad.scatter_add_(1, targets[part, None], grad_chosen[part, None])
                else:
                    mine, others = ctx.axis.own(targets[part], len(weight))
                    grad.scatter_add_(1, mine[:, None], grad_chosen[part, None].masked_fill(others[:, None], 0.0))
                if grad_entropy is not None:  # dH/dlogit = -p log p - p H
                    slope = torch.special.entr(p).addcmul_(p, entropy[part, None], value=-1.0)
                    grad.addcmul_(slope, grad_entropy[part, None], value=1.0 / ctx.temperature)
                grad = grad.to(hidden.dtype)
            grad_hidden[part] = product(grad, weight.T)
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if ctx.axis.size > 1 and ctx.needs_input_grad[0]:
            grad_hidden = ctx.axis.sum(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _fused(hidden: Tensor, axis: Axis) -> bool:
    """True if `_figures` and `_slope` compute from logits in the model's precision: on a GPU without a tensor axis."""
    return axis.size == 1 and hidden.device.type != "cpu"


@compiled
def _figures(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies and log sum exp, each (n,), of logits / temperature."""
    chosen = logits.gather(1, targets[:, None])[:, 0].float() / temperature
    logits = logits.float() / temperature
    largest = logits.amax(dim=1)
    e = (logits - largest[:, None]).exp()
    whole = e.sum(dim=1)
    total = largest + whole.log()
    return chosen - total, total - (e * logits).sum(dim=1) / whole, total


@compiled
def _slope(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    entropy: Tensor,
    total: Tensor,
    grad_chosen: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of logits (n, vocab). `grad_chosen` (n,) is already divided by the temperature."""
    logp = logits.float() / temperature - total[:, None]
    p = logp.exp()
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    grad = grad_chosen[:, None] * (chosen.float() - p)
    if grad_entropy is not None:
        grad = grad - (grad_entropy / temperature)[:, None] * p * (logp + entropy[:, None])
    return grad.to(logits.dtype)


def _among(logits: Tensor, targets: Tensor, temperature: float, axis: Axis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the probabilities of this rank's part of the vocabulary (n, part), and, over all ranks' parts, log-probs
    of the targets, entropies and log sum exp, each (n,), of logits / temperature."""
    logits = logits.float() / temperature
    largest = axis.most(logits.amax(dim=1))
    logits -= largest[:, None]
    e = logits.exp()
    mine, others = axis.own(targets, logits.shape[1])
    chosen = logits.gather(1, mine[:, None])[:, 0].masked_fill(others, 0.0)
    sums, chosen, moment = axis.in_order(torch.stack((e.sum(dim=1), chosen, torch.linalg.vecdot(e, logits))))
    logs = sums.log()
    return e.div_(sums[:, None]), chosen - logs, logs - moment / sums, largest + logs


def _again(ctx: Any, part: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None) -> Tensor:
    """Recompute the probabilities (states of `part`, vocab) in float32, for the backward pass."""
    logits: Tensor = ctx.head(hidden[part], weight, bias)
    if total is None:
        return _log_softmax(logits, ctx.temperature).exp_()
    logits = logits.float() / ctx.temperature
    return logits.sub_(total[part, None]).exp_()


def _chunk_rows(hidden: Tensor, vocab: int) -> int:
    elements = CHUNK_ELEMENTS if hidden.device.type == "cpu" else CHUNK_ELEMENTS_DEVICE
    return max(LEAST_ROWS, elements // vocab)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature != 1.0:
        logits = logits.float().div_(temperature)
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add grad.T @ hidden to `total`, the float32 sum over chunks, in place."""
    if grad.is_cuda and grad.dtype != total.dtype:
        torch.addmm(total, grad.T, hidden, out_dtype=total.dtype, out=total)
    elif grad.dtype == total.dtype and not by_onednn(grad, hidden):
        total.addmm_(grad.T, hidden)
    else:
        total += summed_outer_products(grad, hidden)


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    axis: Axis = ALONE,
) -> tuple[Tensor, Tensor]:
    """Return log softmax((hidden @ weight.T + bias) / temperature)[targets], and the softmax's entropy, (n,) float32.

    hidden (n, width) is the state before each target; weight (vocab, width) is the LM head, or this rank's rows of it
    on a tensor axis; targets (n,) int64.
    """
    chosen, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, product if torch.is_grad_enabled() else linear, axis
    )
    return chosen, entropy


def logprobs_by(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, vocabulary: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the same as `chosen_logprobs` for any head, (n, width) -> (n, vocabulary); backward recomputes logits."""

    def part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = _log_softmax(head(hidden), temperature)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)

    forgotten = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    rows, compute = _chunk_rows(hidden, vocabulary), forgotten if torch.is_grad_enabled() else part
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    chosen, entropy = (torch.cat(column) for column in zip(*(compute(*chunk) for chunk in chunks), strict=True))
    return chosen, entropy


def reverse_kl(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    other_head: Callable[[Tensor], Tensor],
    other_hidden: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) of each token, (n,), without the full logits tensors; q is constant.

    p is the softmax of head(hidden) / temperature, q that of the other model's. Heads map (n, width) to logits; p's has
    `vocabulary` columns, q's at least as many. Backward computes the logits of a chunk again.
    """

    def part(hidden: Tensor, other_hidden: Tensor) -> Tensor:
        logp = _log_softmax(head(hidden), temperature)
        with torch.no_grad():
            logq = _log_softmax(other_head(other_hidden), temperature)[:, :vocabulary]
        return (logp.exp() * (logp - logq)).sum(dim=-1)

    forgotten = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    rows = _chunk_rows(hidden, 4 * vocabulary)  # a chunk's gradient keeps some four tensors of the logits' size
    compute = forgotten if torch.is_grad_enabled() else part
    chunks = zip(torch.split(hidden, rows), torch.split(other_hidden, rows), strict=True)
    return torch.cat([compute(*chunk) for chunk in chunks])
