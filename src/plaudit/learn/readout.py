"""Read a model's outputs for a batch, by role: log-probs of a policy, values of a critic, scores of a judge.

    Batch -> prepared -> Inputs -> model -> hidden states at the places that are read -> finish -> Output

Column rule: the hidden state of token t - 1 decides token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

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


class Inputs(NamedTuple):
    """What a model is given. Every stage of a pipeline has the batch, and so knows the sizes of what passes it."""

    tokens: Tensor  # (n,)
    context: Packed
    read: Tensor  # (m,)


@dataclass(frozen=True)
class Readout:
    places: Callable[[Batch], Tensor]
    """The tokens whose hidden states are read, (m,)."""
    finish: Callable[[LanguageModel, Batch, Tensor, float], Output]
    """From these states, with rows that fill up a pass after them, (>= m, width)."""
    fills: bool = True
    """On the CPU, the number of places is filled up to one of few."""

    def __call__(self, model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
        """`temperature` divides a policy's logits. `share`: compute the common beginning of rows once."""
        return self.finish(model, batch, model(*self.prepared(model, batch, share=share)), temperature)

    def prepared(self, model: LanguageModel, batch: Batch, *, share: bool = True) -> Inputs:
        places = self.places(batch)
        if self.fills and places.device.type == "cpu":
            places = F.pad(places, (0, few(len(places)) - len(places)))
        return _inputs(model, batch, places, share)


Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Work(Generic[Result_co]):
    """What is done with each part of a batch: a pass, and what is kept of its output; with a loss, backwards too."""

    model: LanguageModel
    role: Role
    device: torch.device
    temperature: float
    finish: Callable[[Output, Batch], tuple[Tensor | None, Result_co]]
    trains: bool = False
    clear: Callable[[], None] = lambda: None
    """Undoes parts that are done again."""

    def __call__(self, part: Batch) -> Result_co:
        part = part.to(self.device)
        loss, result = self.finish(READOUTS[self.role](self.model, part, self.temperature), part)
        if self.trains:
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        return result


def counts_once(model: LanguageModel, device: torch.device | str) -> bool:
    """True if a shared prefix also takes memory only once: our kernels read it in place, torch's read copies."""
    return model.caches and torch.device(device).type == "cpu" and available(model.dtype)


def _inputs(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> Inputs:
    """What gives hidden states after the last norm of the tokens at `read` (m,), (m, width). On the CPU, unused filler
    sequences are added so that the number of rows is one of few."""
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
    return Inputs(tokens, Packed(lengths, device=tokens.device, window=model.window, index=index), read)


def _logprobs(model: LanguageModel, batch: Batch, before: Tensor, temperature: float) -> Output:
    """Log-probs and entropies of the trained tokens under softmax(logits / temperature); 0 on the others."""
    place = batch.trainable.nonzero()[:, 0]
    n = len(place)
    targets = F.pad(batch.tokens[place], (0, len(before) - n))
    head = model.head
    if isinstance(head, nn.Linear):
        chosen, entropy = chosen_logprobs(
            before, head.weight, targets, temperature=temperature, bias=head.bias, axis=model.axis
        )
    else:  # a family that runs through transformers
        chosen, entropy = logprobs_by(head, before, targets, vocabulary=model.vocab_size, temperature=temperature)
    return Output(logprobs=_placed(chosen[:n], place, batch), entropy=_placed(entropy[:n], place, batch))


def _values(model: LanguageModel, batch: Batch, states: Tensor, temperature: float) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    place, scores = batch.trainable.nonzero()[:, 0], _scores(model, states)
    n = len(place)
    return Output(values=_placed(scores[:n], place, batch), scores=scores[n : n + len(batch)])


def _placed(values: Tensor, place: Tensor, batch: Batch) -> Tensor:
    """The values at their tokens' places, 0 elsewhere, (n,)."""
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    return zeros.index_copy(0, place, values)


def _rewards(model: LanguageModel, batch: Batch, ends: Tensor, temperature: float) -> Output:
    """One score a row (r,), read at its last token."""
    return Output(scores=_scores(model, ends))


def _scores(model: LanguageModel, hidden: Tensor) -> Tensor:
    """One number a state, (n,), always in float32: bfloat16 would leave it three digits."""
    head = model.head
    assert isinstance(head, nn.Linear)
    return linear(hidden.float(), head.weight.float(), head.bias)[:, 0]


def _before(batch: Batch) -> Tensor:
    return batch.trainable.nonzero()[:, 0] - 1


policy_output = Readout(_before, _logprobs)
READOUTS: dict[Role, Readout] = {
    Role.POLICY: policy_output,
    Role.REFERENCE: policy_output,
    Role.CRITIC: Readout(lambda batch: torch.cat((_before(batch), batch.ends)), _values),
    Role.JUDGE: Readout(lambda batch: batch.ends, _rewards, fills=False),
}
