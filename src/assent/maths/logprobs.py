"""Log-probs and entropies of chosen tokens straight from hidden states: the full logits tensor never exists.

Only trained tokens pass the head, in chunks. The backward pass is written out, so that autograd keeps no logits either:
for a small product of tokens and vocabulary the probabilities are kept, for a large one they are made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assent.maths.invariant import linear

CHUNK_ELEMENTS = 1 << 22
"""Logits computed at once; about 16 MB in float32."""
KEEP_ELEMENTS = 1 << 25
"""Up to this many probabilities are kept for the backward pass (128 MB in float32); beyond it they are recomputed."""


class _ChosenLogprobs(torch.autograd.Function):
    """hidden (n, width), weight (vocab, width), bias (vocab,) or None, targets (n,) -> log-probs, entropies (n,)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        n, vocab = hidden.shape[0], weight.shape[0]
        chunk = max(1, CHUNK_ELEMENTS // vocab)
        keep = n * vocab <= KEEP_ELEMENTS and any(ctx.needs_input_grad)
        chosen = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(chosen)
        kept: list[Tensor] = []
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            logp = _log_softmax(hidden[part], weight, bias, temperature)
            chosen[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(logp.exp(), logp)
            if keep:
                kept.append(logp)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, *kept)
        ctx.chunk, ctx.temperature = chunk, temperature
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_chosen, grad_entropy = grads
        hidden, weight, bias, targets, entropy, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        use_entropy = bool(grad_entropy.any())
        for number, start in enumerate(range(0, hidden.shape[0], ctx.chunk)):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            logp = kept[number] if kept else _log_softmax(hidden[part], weight, bias, ctx.temperature)
            p = logp.exp()
            grad = p * -grad_chosen[part, None]
            grad.scatter_add_(1, targets[part, None], grad_chosen[part, None])
            if use_entropy:  # dH/dlogit = -p (log p + H)
                grad -= grad_entropy[part, None] * p * (logp + entropy[part, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = linear(hidden, weight, bias)
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def chosen_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature)[targets] and that distribution's entropy, (n,) float32.

    hidden (n, width) is the state before each target; weight (vocab, width) is the LM head; targets (n,) int64.
    """
    chosen, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature
    )
    return chosen, entropy
