"""What a model says of a batch, by role: log-probs of a policy, values of a critic, scores of a judge.

Column rule: the decision to emit token t was made from the hidden state of token t - 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from assent.algorithms.base import Output
from assent.batch import Batch
from assent.maths.invariant import linear
from assent.maths.logprobs import chosen_logprobs
from assent.models.base import LanguageModel
from assent.models.context import Packed
from assent.types import Role

Readout = Callable[[LanguageModel, Batch, float], Output]


def _hidden(model: LanguageModel, batch: Batch) -> Tensor:
    context = Packed(batch.lengths.tolist(), device=batch.tokens.device, window=model.window)
    return model(batch.tokens, context)  # type: ignore[no-any-return]


def policy_output(model: LanguageModel, batch: Batch, temperature: float) -> Output:
    """Log-probs and entropies of the trained tokens under softmax(logits / temperature); 0 on the others."""
    place = batch.trainable.nonzero()[:, 0]
    before = _hidden(model, batch).index_select(0, place - 1)
    head = model.head
    assert isinstance(head, nn.Linear)
    chosen, entropy = chosen_logprobs(before, head.weight, batch.tokens[place], temperature=temperature, bias=head.bias)
    zeros = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=batch.tokens.device)
    return Output(
        logprobs=zeros.index_copy(0, place, chosen),
        entropy=zeros.index_copy(0, place, entropy),
    )


def critic_output(model: LanguageModel, batch: Batch, temperature: float) -> Output:
    """Values of the state before each trained token (n,), and after each row's last token (r,) as `scores`."""
    scores = _scores(model, _hidden(model, batch))
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
