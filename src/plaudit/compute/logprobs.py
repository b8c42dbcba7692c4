"""Log-probs and entropies of chosen tokens directly from hidden states, without the full logits tensor.

Only trained tokens pass the head, in chunks. The backward pass is written out, so that autograd keeps no logits either.
If tokens times vocabulary is small the probabilities are kept, otherwise they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from plaudit.compute.invariant import linear
from plaudit.compute.products import by_onednn, product, summed_outer_products

CHUNK_ELEMENTS = 1 << 22
"""Logits computed at once on the CPU; about 16 MB in float32."""
CHUNK_ELEMENTS_DEVICE = 1 << 28
"""Logits computed at once elsewhere, where memory is larger and small matrix products are wasteful; about 1 GB."""
LEAST_ROWS = 256
"""The fewest tokens at once: each chunk reads the head and adds to a gradient of its size."""
KEEP_ELEMENTS = 1 << 25
"""Up to this many probabilities are kept for the backward pass (128 MB in float32); beyond it they are recomputed."""


class _ChosenLogprobs(torch.autograd.Function):
    """hidden (n, width), weight (vocab, width), bias (vocab,) or None, targets (n,) -> log-probs, entropies (n,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        head: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor]:
        n, vocab = hidden.shape[0], weight.shape[0]
        rows = _chunk_rows(hidden, vocab)
        keep = n * vocab <= KEEP_ELEMENTS and any(ctx.needs_input_grad)
        chosen = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(chosen)
        kept: list[Tensor] = []
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            logp = _log_softmax(head(hidden[part], weight, bias), temperature)
            p = logp.exp()
            chosen[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, logp)
            if keep:
                kept.append(p)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, *kept)
        ctx.rows, ctx.temperature, ctx.head = rows, temperature, head
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, *kept = ctx.saved_tensors
        grad_chosen = torch.zeros_like(entropy) if grad_chosen is None else grad_chosen / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for number, start in enumerate(range(0, hidden.shape[0], ctx.rows)):
            part = slice(start, min(start + ctx.rows, hidden.shape[0]))
            p = kept[number] if kept else _log_softmax(ctx.head(hidden[part], weight, bias), ctx.temperature).exp_()
            grad = p * -grad_chosen[part, None]
            grad.scatter_add_(1, targets[part, None], grad_chosen[part, None])
            if grad_entropy is not None:  # dH/dlogit = -p log p - p H
                slope = torch.special.entr(p).addcmul_(p, entropy[part, None], value=-1.0)
                grad.addcmul_(slope, grad_entropy[part, None], value=1.0 / ctx.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = product(grad, weight.T)
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _chunk_rows(hidden: Tensor, vocab: int) -> int:
    elements = CHUNK_ELEMENTS if hidden.device.type == "cpu" else CHUNK_ELEMENTS_DEVICE
    return max(LEAST_ROWS, elements // vocab)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature != 1.0:
        logits = logits.float().div_(temperature)
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total += grad.T @ hidden, summed over chunks in float32."""
    if grad.dtype == total.dtype and not by_onednn(grad, hidden):
        total.addmm_(grad.T, hidden)
    else:
        total += summed_outer_products(grad, hidden)


def chosen_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature)[targets] and that distribution's entropy, (n,) float32.

    hidden (n, width) is the state before each target; weight (vocab, width) is the LM head; targets (n,) int64.
    """
    chosen, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, product if torch.is_grad_enabled() else linear
    )
    return chosen, entropy


def logprobs_by(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, vocabulary: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `chosen_logprobs` for any head (n, width) -> (n, vocabulary); the backward pass computes its logits again."""

    def part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = _log_softmax(head(hidden), temperature)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)

    forgotten = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    rows, compute = _chunk_rows(hidden, vocabulary), forgotten if torch.is_grad_enabled() else part
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    chosen, entropy = (torch.cat(column) for column in zip(*(compute(*chunk) for chunk in chunks), strict=True))
    return chosen, entropy
