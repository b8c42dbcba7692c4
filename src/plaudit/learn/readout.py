"""What a model says of a batch, by role: log-probs of a policy, values of a critic, scores of a judge.

Column rule: the decision to emit token t was made from the hidden state of token t - 1.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.kernels.library import available
from plaudit.maths.invariant import few, linear
from plaudit.maths.logprobs import chosen_logprobs, logprobs_by
from plaudit.models.base import LanguageModel
from plaudit.models.context import Packed
from plaudit.models.prefixes import shared
from plaudit.types import Role

WORTH = 0.97
"""Share of the tokens that must be left for sharing to be worth its gathers."""


class Readout(Protocol):
    def __call__(self, model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
        """`temperature` divides a policy's logits. `share`: rows that begin alike compute that once."""
        ...


def shares(model: LanguageModel, device: torch.device | str) -> bool:
    """Whether a pass now can compute what rows share once. Without gradients rows are as if alone, on the CPU
    (maths/invariant.py); but under torch's attention a prefix goes by whose row it is read from, since its kernels go
    by a row's length."""
    alone = not torch.is_grad_enabled() and torch.device(device).type == "cpu"
    return model.caches and (not alone or available(model.dtype))


def counts_once(model: LanguageModel, device: torch.device | str) -> bool:
    """Whether what rows share also takes the room of one: our kernels attend to it where it is, torch's to copies."""
    return shares(model, device) and torch.device(device).type == "cpu" and available(model.dtype)


def _hidden(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> Tensor:
    """After the last norm, of the tokens at `read` (m,), (m, width). On the CPU sequences that nobody reads are
    computed beside them, so that the number of rows is one of few."""
    tokens, lengths, index = batch.tokens, batch.lengths.tolist(), None
    if share and len(lengths) > 1 and shares(model, tokens.device):
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
    """Hidden states at `places` (n,), which on the CPU are filled up to one of few numbers: (m, width), m >= n."""
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
        chosen, entropy = chosen_logprobs(before, head.weight, targets, temperature=temperature, bias=head.bias)
    else:  # of a family that transformers computes
        chosen, entropy = logprobs_by(head, before, targets, vocabulary=model.vocab_size, temperature=temperature)
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    return Output(
        logprobs=zeros.index_copy(0, place, chosen[:n]),
        entropy=zeros.index_copy(0, place, entropy[:n]),
    )


def critic_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    place, ends = batch.trainable.nonzero()[:, 0], batch.ends
    scores = _scores(model, _read(model, batch, torch.cat((place - 1, ends)), share))
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    n = len(place)
    return Output(values=zeros.index_copy(0, place, scores[:n]), scores=scores[n : n + len(ends)])


def judge_output(model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
    """One score a row (r,), read at its last token."""
    return Output(scores=_scores(model, _hidden(model, batch, batch.ends, share)))


def _scores(model: LanguageModel, hidden: Tensor) -> Tensor:
    """One number a state, (n,), in float32 whatever the model's precision: bfloat16 would leave it three digits."""
    head = model.head
    assert isinstance(head, nn.Linear)
    return linear(hidden.float(), head.weight.float(), head.bias)[:, 0]


READOUTS: dict[Role, Readout] = {
    Role.POLICY: policy_output,
    Role.REFERENCE: policy_output,
    Role.CRITIC: critic_output,
    Role.JUDGE: judge_output,
}
