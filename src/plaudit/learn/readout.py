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


def _hidden(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> Tensor:
    """Hidden states after the last norm of the tokens at `read` (m,), (m, width). On the CPU, unused filler sequences
    are added so that the number of rows is one of few."""
    tokens, lengths, index = batch.tokens, batch.lengths.tolist(), None
    if share and len(lengths) > 1 and model.caches:
        rows = [row.tolist() for row in torch.split(tokens.cpu(), lengths)]
        computed, places = shared(rows)
        if len(computed) <= WORTH * len(tokens):
            index = places
            read = torch.tensor(index, device=tokens.device)[read]
            tokens = torch.tensor(computed, device=tokens.device)
    compiled = tokens.device.type == "cpu" and model.caches
    if compiled:
        filler, longest = few(len(tokens)) - len(tokens), max(lengths)
        lengths += [longest] * (filler // longest) + ([filler % longest] if filler % longest else [])
        index = None if index is None else [*index, *range(len(tokens), len(tokens) + filler)]
        tokens = F.pad(tokens, (0, filler))
    context = Packed(lengths, device=tokens.device, window=model.window, index=index)
    return model(tokens, context, read)  # type: ignore[no-any-return]


def _read(model: LanguageModel, batch: Batch, places: Tensor, share: bool) -> Tensor:
    """Hidden states at `places` (n,), filled up on the CPU to one of few numbers: (m, width), m >= n."""
    if places.device.type == "cpu":
        places = F.pad(places, (0, few(len(places)) - len(places)))
    return _hidden(model, batch, places, share)


def policy_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """Log-probs and entropies of the trained tokens under softmax(logits / temperature); 0 on the others."""
    place = batch.trainable.nonzero()[:, 0]
    n = len(place)
    before = _read(model, batch, place - 1, share)
    targets = F.pad(batch.tokens[place], (0, len(before) - n))
    head = model.head
    if isinstance(head, nn.Linear):
        chosen, entropy = chosen_logprobs(
            before, head.weight, targets, temperature=temperature, bias=head.bias, axis=model.axis
        )
    else:  # a family that runs through transformers
        chosen, entropy = logprobs_by(head, before, targets, vocabulary=model.vocab_size, temperature=temperature)
    return Output(logprobs=_placed(chosen[:n], place, batch), entropy=_placed(entropy[:n], place, batch))


def critic_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    place, ends = batch.trainable.nonzero()[:, 0], batch.ends
    scores = _scores(model, _read(model, batch, torch.cat((place - 1, ends)), share))
    n = len(place)
    return Output(values=_placed(scores[:n], place, batch), scores=scores[n : n + len(ends)])


def _placed(values: Tensor, place: Tensor, batch: Batch) -> Tensor:
    """The values at their tokens' places, 0 elsewhere, (n,)."""
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    return zeros.index_copy(0, place, values)


def judge_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """One score a row (r,), read at its last token."""
    return Output(scores=_scores(model, _hidden(model, batch, batch.ends, share)))


def _scores(model: LanguageModel, hidden: Tensor) -> Tensor:
    """One number a state, (n,), always in float32: bfloat16 would leave it three digits."""
    head = model.head
    assert isinstance(head, nn.Linear)
    return linear(hidden.float(), head.weight.float(), head.bias)[:, 0]


READOUTS: dict[Role, Readout] = {
    Role.POLICY: policy_output,
    Role.REFERENCE: policy_output,
    Role.CRITIC: critic_output,
    Role.JUDGE: judge_output,
}
