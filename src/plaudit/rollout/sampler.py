"""Draws the next token of every row from its logits, each row by its own settings.

    logits (n, vocab), one uniform number a row -> token and its log-prob a row

A draw inverts the cumulative distribution at the row's uniform number. One number a token suffices, so a row's numbers
can be drawn before it starts: its samples depend on its seed and not on its neighbours. Left out: penalties, min-p and
beams; sequences and caches, which are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.types import Sampling

CANDIDATES = (256, 2048, 16384)
"""How many of the likeliest tokens top-p considers, one number after the other. Finding them costs a small part of
sorting the vocabulary."""
BLOCK = 64
"""Consecutive tokens that are first searched as one: summing blocks is far cheaper than a running sum over all."""


def uniforms(sampling: Sampling, count: int) -> Tensor:
    """Return the random numbers of one completion, (count,) float32 in [0, 1), from its seed. They are made on the CPU,
    so that draws are equal on every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(sampling.seed), dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling settings of all rows as tensors. The engine makes them again only when rows begin or end."""

    temperature: Tensor | None  # (n, 1); 1 on greedy rows; None if 1 everywhere
    greedy: Tensor | None  # (n,) bool; None if no row is
    all_greedy: bool
    filters: tuple[tuple[int, Tensor, Tensor], ...]
    """Rows whose distribution is cut: top_k (0 for all tokens), row numbers (m,), top_p (m, 1)."""
    min_tokens: Tensor | None  # (n,); None if 0 everywhere

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Draw:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        temperatures = [1.0 if sampling.greedy else sampling.temperature for sampling in samplings]
        greedy = [sampling.greedy for sampling in samplings]
        least = [sampling.min_tokens for sampling in samplings]
        cuts: dict[int, list[int]] = {}
        for row, sampling in enumerate(samplings):
            if not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0):
                cuts.setdefault(sampling.top_k, []).append(row)
        return cls(
            temperature=column(temperatures, torch.float32)[:, None] if set(temperatures) - {1.0} else None,
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            all_greedy=all(greedy),
            filters=tuple(
                (k, column(rows, torch.int64), column([samplings[row].top_p for row in rows], torch.float32)[:, None])
                for k, rows in cuts.items()
            ),
            min_tokens=column(least, torch.int64) if any(least) else None,
        )


def sample(logits: Tensor, draw: Draw, uniform: Tensor, *, emitted: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens (n,) int64 and their log-probs (n,) float32, drawn from logits (n, vocab) float32.

    uniform (n,) is in [0, 1); emitted (n,) counts each row's tokens so far. Rows below their min_tokens cannot draw one
    of `ends`. Greedy rows take the largest logit, with its log-prob at temperature 1. `logits` may be overwritten.
    """
    if draw.min_tokens is not None and len(ends):
        banned = (emitted < draw.min_tokens)[:, None]
        logits[:, ends] = logits[:, ends].masked_fill(banned, float("-inf"))
    if draw.temperature is not None:
        logits = logits.div_(draw.temperature)
    tokens, logprobs = _sample_all(logits, draw, uniform)
    for top_k, rows, top_p in draw.filters:
        tokens[rows], logprobs[rows] = _sample_kept(logits[rows], top_k, top_p, uniform[rows])
    return tokens, logprobs


def _sample_all(logits: Tensor, draw: Draw, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from whole distributions; take the largest logit of greedy rows. `sample` redraws rows of `draw.filters`."""
    if sum(len(rows) for _, rows, _ in draw.filters) == len(logits):
        return torch.zeros_like(uniform, dtype=torch.int64), torch.zeros_like(uniform)
    probs = logits.softmax(dim=-1)
    if draw.greedy is None:
        tokens = invert(probs, uniform)
    elif draw.all_greedy:
        tokens = largest(logits)
    else:
        tokens = torch.where(draw.greedy, largest(logits), invert(probs, uniform))
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def largest(logits: Tensor) -> Tensor:
    """Return each row's argmax (n,), the first index on ties. By blocks, since argmax compares one number at a time."""
    block = _blocks(logits, torch.amax).argmax(dim=-1)
    return _within(logits, block, float("-inf")).argmax(dim=-1) + block * BLOCK


def _blocks(table: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce each block of a row to one number; the last block may be shorter: (n, m) -> (n, ceil(m / BLOCK))."""
    whole = table.shape[1] // BLOCK * BLOCK
    parts = [reduce(table[:, :whole].reshape(len(table), -1, BLOCK), dim=-1)] if whole else []
    if whole < table.shape[1]:
        parts.append(reduce(table[:, whole:], dim=-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _within(table: Tensor, block: Tensor, absent: float) -> Tensor:
    """Return block number block[i] of each row i, (n, BLOCK), with `absent` past the row's end."""
    places = block[:, None] * BLOCK + torch.arange(BLOCK, device=table.device)
    inside = table.gather(1, places.clamp(max=table.shape[1] - 1))
    return inside if table.shape[1] % BLOCK == 0 else inside.masked_fill_(places >= table.shape[1], absent)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total: i with probability weights[i] / total.

    weights (n, m) >= 0 with a positive sum, uniform (n,) in [0, 1) -> (n,) int64. An index of weight 0 never comes out:
    the cumulative sum does not move there, so it cannot be the first to exceed anything.
    """
    if weights.shape[1] <= BLOCK:
        return _search(weights, uniform[:, None])[0]
    block, left = _search(_blocks(weights, torch.sum), uniform[:, None])
    inside = _search(_within(weights, block, 0.0), left)[0]
    # NaN weights would point past the end, which crashes an accelerator. Clamped, the draw has a log-prob that is not
    # finite, and the engine reports that.
    return (inside + block * BLOCK).clamp_(max=weights.shape[1] - 1)


def _search(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index (n,) whose cumulative weight exceeds share * total, and the fraction (n, 1) of its own
    weight that lies before share * total."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # share * total may round up to the total, which nothing exceeds; the number below it is exceeded by the last index
    # that has weight.
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    if not weights.is_cpu:  # a GPU adds in parallel: the sum's last bit may change even where a weight is 0
        index = torch.where(weights.gather(1, index) > 0, index, weights.argmax(dim=-1, keepdim=True))
    end = cumulative.gather(1, index)
    before = cumulative.gather(1, (index - 1).clamp_(min=0)).masked_fill_(index == 0, 0)
    return index[:, 0], (target - before) / (end - before)


def _sample_kept(logits: Tensor, top_k: int, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the fewest of the top_k likeliest tokens (all if 0) whose mass reaches top_p; at least one is kept.

    Exactly top_k tokens are kept: of equal logits at the edge, those that `topk` returns. For top_p, a whole row is
    sorted only if none of the numbers in CANDIDATES is enough.
    """
    vocab = logits.shape[1]
    if 0 < top_k < vocab:
        largest, order = logits.topk(top_k, dim=-1)
        return _sample_sorted(largest, order, largest.logsumexp(dim=-1, keepdim=True), top_p, uniform)
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    tokens, logprobs = torch.zeros_like(uniform, dtype=torch.int64), torch.zeros_like(uniform)
    rows = torch.arange(len(logits), device=logits.device)
    for count in (*CANDIDATES, vocab):
        left = logits if len(rows) == len(logits) else logits[rows]
        if count < vocab:
            largest, order = left.topk(count, dim=-1)
            enough = (largest - normaliser[rows]).exp().sum(dim=-1) >= top_p[rows, 0]
        else:
            largest, order = left.sort(dim=-1, descending=True, stable=True)
            enough = torch.ones_like(rows, dtype=torch.bool)
        done, rows = rows[enough], rows[~enough]
        if len(done):
            tokens[done], logprobs[done] = _sample_sorted(
                largest[enough], order[enough], normaliser[done], top_p[done], uniform[done]
            )
        if not len(rows):
            break
    return tokens, logprobs


def _sample_sorted(
    largest: Tensor, order: Tensor, normaliser: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from descending logits `largest` (n, m) of tokens `order`; drop a token if those before it reach top_p."""
    probs = (largest - normaliser).exp()
    before = probs.cumsum(dim=-1) - probs
    dropped = (before >= top_p) & (top_p < 1.0)  # rounding may lift `before` to 1
    dropped[:, 0] = False
    logprobs = largest.masked_fill(dropped, float("-inf")).log_softmax(dim=-1)
    place = invert(logprobs.exp(), uniform)[:, None]
    return order.gather(1, place)[:, 0], logprobs.gather(1, place)[:, 0]
