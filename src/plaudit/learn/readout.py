"""Read a model's outputs for a batch, by role: log-probs of a policy, values of a critic, scores of a judge.

Column rule: the hidden state of token t - 1 decides token t.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.compute.calls import available
from plaudit.compute.context import Packed
from plaudit.compute.invariant import few, linear
from plaudit.compute.logprobs import chosen_logprobs, logprobs_by
from plaudit.learn.prefixes import shared
from plaudit.models.base import LanguageModel
from plaudit.types import Role

WORTH = 0.97
"""Prefixes are shared if at most this share of the tokens is left: gathers cost time too."""


class Readout(Protocol):
    def __call__(self, model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
        """`temperature` divides a policy's logits. `share`: compute the common beginning of rows once."""
        ...


def counts_once(model: LanguageModel, device: torch.device | str) -> bool:
    """True if a shared prefix also takes memory only once: our kernels read it in place, torch's read copies."""
    return model.caches and torch.device(device).type == "cpu" and available(model.dtype)


def _hidden(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states after the last norm, (m, width); which of the tokens at `read` (n,) this rank computes, (k,), and
    where their states are among the m, (k,). Ranks that share a pass compute equal runs of its tokens. Unused filler
    sequences make them equal; on the CPU they also make the number of rows one of few."""
    tokens, lengths, index = batch.tokens, batch.lengths.tolist(), None
    if share and len(lengths) > 1 and model.caches:
        rows = [row.tolist() for row in torch.split(tokens.cpu(), lengths)]
        computed, places = shared(rows)
        if len(computed) <= WORTH * len(tokens):
            index = places
            read = torch.tensor(index, device=tokens.device)[read]
            tokens = torch.tensor(computed, device=tokens.device)
    compiled, axis = tokens.device.type == "cpu" and model.caches, model.context_axis
    runs = axis.size * model.axis.runs
    size = -(-len(tokens) // runs)
    size = few(size) if compiled else size
    if filler := size * runs - len(tokens):
        longest = max(lengths)
        lengths += [longest] * (filler // longest) + ([filler % longest] if filler % longest else [])
        index = None if index is None else [*index, *range(len(tokens), len(tokens) + filler)]
        tokens = F.pad(tokens, (0, filler))
    mine, at, own = _mine(model, read, size)
    context = Packed(lengths, device=tokens.device, window=model.window, index=index, axis=axis)
    return model(tokens.chunk(axis.size)[axis.rank], context, own), mine, at


def _mine(model: LanguageModel, read: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens at `read` (n,), in runs of `size`: which are this rank's (k,), where they are among its reads
    (k,), and its reads' places among its tokens (m,). Each of its runs on the tensor axis has as many reads, filled up
    with its first token, and on the CPU to one of few numbers."""
    count, first = model.axis.runs, model.context_axis.rank * model.axis.runs
    runs = read // size - first
    mine = ((runs >= 0) & (runs < count)).nonzero()[:, 0]
    mine = mine[runs[mine].argsort(stable=True)]
    counts = torch.bincount(runs[mine], minlength=count)
    most = max(1, int(counts.max()))
    most = few(most) if read.device.type == "cpu" else most
    starts = torch.arange(count, device=read.device) * most - (counts.cumsum(0) - counts)
    at = torch.arange(len(mine), device=read.device) + starts[runs[mine]]
    places = (torch.arange(count, device=read.device) * size).repeat_interleave(most)
    return mine, at, places.index_copy(0, at, read[mine] - first * size)


def policy_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """Log-probs and entropies of the trained tokens under softmax(logits / temperature); 0 on the others."""
    place = batch.trainable.nonzero()[:, 0]
    before, mine, at = _hidden(model, batch, place - 1, share)
    place, head = place[mine], model.head
    targets = batch.tokens.new_zeros(len(before)).index_copy(0, at, batch.tokens[place])
    if isinstance(head, nn.Linear):
        chosen, entropy = chosen_logprobs(
            before, head.weight, targets, temperature=temperature, bias=head.bias, axis=model.axis
        )
    else:  # a family that runs through transformers
        chosen, entropy = logprobs_by(head, before, targets, vocabulary=model.vocab_size, temperature=temperature)
    found = (_placed(column[at], place, len(batch.tokens)) for column in (chosen, entropy))
    logprobs, entropy = map(model.context_axis.leave, found)
    return Output(logprobs=logprobs, entropy=entropy)


def critic_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    place, ends = batch.trainable.nonzero()[:, 0], batch.ends
    scores = _scores(model, batch, torch.cat((place - 1, ends)), share)
    n = len(place)
    return Output(values=_placed(scores[:n], place, len(batch.tokens)), scores=scores[n:])


def _placed(values: Tensor, place: Tensor, count: int) -> Tensor:
    """The values at their places, 0 elsewhere, (count,)."""
    return torch.zeros(count, dtype=torch.float32, device=values.device).index_copy(0, place, values)


def judge_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """One score a row (r,), read at its last token."""
    return Output(scores=_scores(model, batch, batch.ends, share))


def _scores(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> Tensor:
    """One number a token at `read`, (n,), always in float32: bfloat16 would leave it three digits."""
    hidden, mine, at = _hidden(model, batch, read, share)
    head = model.head
    assert isinstance(head, nn.Linear)
    scores = linear(hidden.float(), head.weight.float(), head.bias)[:, 0]
    return model.context_axis.leave(_placed(scores[at], mine, len(read)))


READOUTS: dict[Role, Readout] = {
    Role.POLICY: policy_output,
    Role.REFERENCE: policy_output,
    Role.CRITIC: critic_output,
    Role.JUDGE: judge_output,
}
