"""What a model says of a batch, by role: log-probs of a policy, values of a critic, scores of a judge.

Column rule: the decision to emit token t was made from the hidden state of token t - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assent.algorithms.base import Output
from assent.batch import Batch
from assent.maths.invariant import few, linear
from assent.maths.logprobs import chosen_logprobs
from assent.models.base import LanguageModel
from assent.models.context import Packed
from assent.types import Role

Readout = Callable[[LanguageModel, Batch, float], Output]


def _hidden(model: LanguageModel, batch: Batch) -> Tensor:
    """After the last norm, (tokens, width); on the CPU with some further rows behind, of sequences that nobody reads,
    so that the number of rows is one of few."""
    tokens, lengths = batch.tokens, batch.lengths.tolist()
    compiled = tokens.device.type == "cpu" and model.caches
    if compiled:
        filler, longest = few(len(tokens)) - len(tokens), max(lengths)
        lengths += [longest] * (filler // longest) + ([filler % longest] if filler % longest else [])
        tokens = F.pad(tokens, (0, filler))
    halves = model.dtype.itemsize < 4  # their attention is of products
    context = Packed(lengths, device=tokens.device, window=model.window, recurring=compiled and halves)
    return model(tokens, context)  # type: ignore[no-any-return]


def policy_output(model: LanguageModel, batch: Batch, temperature: float) -> Output:
    """Log-probs and entropies of the trained tokens under softmax(logits / temperature); 0 on the others."""
    place = batch.trainable.nonzero()[:, 0]
    n = len(place)
    asked = F.pad(place, (0, few(n) - n), value=1) if place.device.type == "cpu" else place
    before = _hidden(model, batch).index_select(0, asked - 1)
    head = model.head
    assert isinstance(head, nn.Linear)
    chosen, entropy = chosen_logprobs(before, head.weight, batch.tokens[asked], temperature=temperature, bias=head.bias)
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    return Output(
        logprobs=zeros.index_copy(0, place, chosen[:n]),
        entropy=zeros.index_copy(0, place, entropy[:n]),
    )


def critic_output(model: LanguageModel, batch: Batch, temperature: float) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    scores = _scores(model, _hidden(model, batch)[: len(batch.tokens)])
    before = torch.cat((scores[:1], scores[:-1]))
    return Output(values=torch.where(batch.trainable, before, 0.0), scores=scores[batch.ends])


def judge_output(model: LanguageModel, batch: Batch, temperature: float) -> Output:
    """One score a row (r,), read at its last token."""
    hidden = _hidden(model, batch)
    return Output(scores=_scores(model, hidden[batch.ends]))


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
