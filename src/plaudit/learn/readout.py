"""Forward pass and outputs by role: log-probs of a policy, values of a critic, scores of a reward model.

    Batch -> prepared -> Inputs (packed tokens, indices to read) -> model -> hidden states there -> finish -> Output

Shift by one: the hidden state of token t - 1 predicts token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.algorithms.base import Output
from plaudit.batch import Batch
from plaudit.compute.calls import available
from plaudit.compute.context import Packed
from plaudit.compute.invariant import few, linear
from plaudit.compute.logprobs import chosen_logprobs, logprobs_by, reverse_kl
from plaudit.learn.prefixes import shared
from plaudit.models.base import LanguageModel
from plaudit.support.fields import SettingsError
from plaudit.types import Role

WORTH = 0.97
"""Common prefixes are computed once only if at most this share of the tokens remains: gathers cost time too."""


class Inputs(NamedTuple):
    """The inputs of a forward pass. Each pipeline stage makes them from the batch, and so knows the states' shapes."""

    tokens: Tensor  # (n,), this rank's tokens of the pass
    context: Packed
    read: Tensor  # (m,), indices into `tokens` whose hidden states the model returns, with padding
    mine: Tensor  # (k,), which of the batch's reads are this rank's
    at: Tensor  # (k,), the indices of these reads in `read`


@dataclass(frozen=True)
class Readout:
    places: Callable[[Batch], Tensor]
    """Returns the indices of the tokens whose hidden states are read."""
    finish: Callable[[LanguageModel, Batch, Inputs, Tensor, float], Output]
    """Turns the hidden states at this rank's `read`, (m, width), into the role's outputs."""

    def __call__(self, model: LanguageModel, batch: Batch, temperature: float, *, share: bool = True) -> Output:
        """Run the model. `temperature` divides a policy's logits. `share`: compute common prefixes of rows once."""
        inputs = self.prepared(model, batch, share=share)
        states = model(inputs.tokens, inputs.context, inputs.read)
        return self.finish(model, batch, inputs, states, temperature)

    def prepared(self, model: LanguageModel, batch: Batch, *, share: bool = True) -> Inputs:
        return _inputs(model, batch, self.places(batch), share)


@dataclass(frozen=True)
class Teacher:
    """A model in the policy's process to whose whole distribution the policy's is compared."""

    model: LanguageModel

    @classmethod
    def of(cls, model: LanguageModel, policy: LanguageModel) -> Self:
        """Raises SettingsError for a model without logits of some of the policy's tokens."""
        if model.vocab_size < policy.vocab_size:
            raise SettingsError(
                f"algorithm.whole_vocabulary=true: the teacher has {model.vocab_size} logits, and the policy "
                f"{policy.vocab_size}. Set it to false, or give a teacher with at least as many"
            )
        return cls(model)

    def compared(self, policy: LanguageModel, batch: Batch, temperature: float) -> Output:
        """Return the policy's outputs with `divergence`. Neither model is cut or sharded."""
        inputs, hidden = self._states(policy, batch)
        output = policy_output.finish(policy, batch, inputs, hidden, temperature)
        with torch.no_grad():
            own, theirs = self._states(self.model, batch)
        heads = policy.head, hidden[inputs.at], self.model.head, theirs[own.at]
        kl = reverse_kl(*heads, vocabulary=policy.vocab_size, temperature=temperature)
        place = batch.trainable.nonzero()[:, 0]
        return replace(output, divergence=_placed(kl, place, len(batch.tokens)))

    @staticmethod
    def _states(model: LanguageModel, batch: Batch) -> tuple[Inputs, Tensor]:
        inputs = policy_output.prepared(model, batch)
        return inputs, model(inputs.tokens, inputs.context, inputs.read)


Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Work(Generic[Result_co]):
    """A pass over a part of a batch: forward, `finish` (loss, result), backward if it `trains`; returns the result."""

    model: LanguageModel
    role: Role
    device: torch.device
    temperature: float
    finish: Callable[[Output, Batch], tuple[Tensor | None, Result_co]]
    trains: bool = False
    clear: Callable[[], None] = lambda: None
    """Discards what earlier parts added, such as gradients, before all parts are computed again."""
    teacher: Teacher | None = None

    def __call__(self, part: Batch) -> Result_co:
        part = part.to(self.device)
        read = READOUTS[self.role] if self.teacher is None else self.teacher.compared
        loss, result = self.finish(read(self.model, part, self.temperature), part)
        if self.trains:
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        return result


def counts_once(model: LanguageModel, device: torch.device | str) -> bool:
    """True if a shared prefix, computed once, also takes memory once: CPU kernels read it in place, torch copies."""
    return model.caches and torch.device(device).type == "cpu" and available(model.dtype)


def _inputs(model: LanguageModel, batch: Batch, read: Tensor, share: bool) -> Inputs:
    """Return the inputs that give the hidden states, after the last norm, of the tokens at `read`. Ranks that share a
    pass compute runs of equal size, padded with unused sequences; on the CPU, to one of a few sizes."""
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
    return Inputs(tokens.chunk(axis.size)[axis.rank], context, own, mine, at)


def _mine(model: LanguageModel, read: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the reads (n,) among ranks by runs of `size` tokens. Return which reads are this rank's (k,), their indices
    in its padded reads (k,), and these as indices of its tokens (m,). Each of its runs on the tensor axis has equally
    many reads: they are padded with the run's first token, on the CPU to one of a few numbers."""
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


def _logprobs(model: LanguageModel, batch: Batch, inputs: Inputs, before: Tensor, temperature: float) -> Output:
    """Return log-probs and entropies (n,) of the trained tokens under softmax(logits / temperature); 0 on the rest."""
    place, head = batch.trainable.nonzero()[:, 0][inputs.mine], model.head
    targets = batch.tokens.new_zeros(len(before)).index_copy(0, inputs.at, batch.tokens[place])
    if isinstance(head, nn.Linear):
        chosen, entropy = chosen_logprobs(
            before, head.weight, targets, temperature=temperature, bias=head.bias, axis=model.axis
        )
    else:  # a model that runs through transformers
        chosen, entropy = logprobs_by(head, before, targets, vocabulary=model.vocab_size, temperature=temperature)
    found = (_placed(column[inputs.at], place, len(batch.tokens)) for column in (chosen, entropy))
    logprobs, entropy = map(model.context_axis.leave, found)
    return Output(logprobs=logprobs, entropy=entropy)


def _values(model: LanguageModel, batch: Batch, inputs: Inputs, states: Tensor, temperature: float) -> Output:
    """Return `values` of the state before each trained token (n,), else 0, and `scores` after each row's end (r,)."""
    place = batch.trainable.nonzero()[:, 0]
    n = len(place)
    scores = _scores(model, inputs, states, n + len(batch))
    return Output(values=_placed(scores[:n], place, len(batch.tokens)), scores=scores[n:])


def _placed(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Return float32 (count,) with `values` at the indices `place` and 0 elsewhere."""
    return torch.zeros(count, dtype=torch.float32, device=values.device).index_copy(0, place, values)


def _rewards(model: LanguageModel, batch: Batch, inputs: Inputs, ends: Tensor, temperature: float) -> Output:
    """Return one score per row (r,), read at its last token."""
    return Output(scores=_scores(model, inputs, ends, len(batch)))


def _scores(model: LanguageModel, inputs: Inputs, states: Tensor, count: int) -> Tensor:
    """Return one number for each of `count` tokens, (count,), in float32: bfloat16 would leave it three digits."""
    head = model.head
    assert isinstance(head, nn.Linear)
    scores = linear(states.float(), head.weight.float(), head.bias)[:, 0]
    return model.context_axis.leave(_placed(scores[inputs.at], inputs.mine, count))


def _before(batch: Batch) -> Tensor:
    return batch.trainable.nonzero()[:, 0] - 1


policy_output = Readout(_before, _logprobs)
READOUTS: dict[Role, Readout] = {
    Role.POLICY: policy_output,
    Role.REFERENCE: policy_output,
    Role.CRITIC: Readout(lambda batch: torch.cat((_before(batch), batch.ends)), _values),
    Role.JUDGE: Readout(lambda batch: batch.ends, _rewards),
}
