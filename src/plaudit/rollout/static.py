"""The engine for models that run through transformers: fixed batches, left padding, transformers' own cache.

    waiting samples -> batches of up to `slots` -> prompt pass, then a step a token until the last of them ends

It is slower than `native.py` and warns of that: a batch ends with its longest answer, finished rows are still computed,
and each sample computes its own prompt. If a probe shows that a family's cache does not reproduce its whole-sequence
pass under left padding, whole sequences are read for every token. Left out: refill and prompt sharing.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plaudit.models.base import LanguageModel
from plaudit.models.fallback import Fallback
from plaudit.rollout.accepted import check_held, check_names
from plaudit.rollout.queued import DIVERGED, Draft, QueuedEngine
from plaudit.rollout.sampler import Draw, sample, uniforms
from plaudit.rollout.text import TextDecoder, end_tokens
from plaudit.runtime.memory import memory_tried

log = logging.getLogger(__name__)


class WholeReader:
    """Computes logits (rows, vocab) after each whole sequence without a KV cache, which works for every model."""

    def __init__(self, model: Fallback):
        self.model = model

    @torch.no_grad()
    def __call__(self, sequences: Sequence[list[int]]) -> Tensor:
        context = self.model.packed([len(sequence) for sequence in sequences])
        tokens = torch.tensor([token for sequence in sequences for token in sequence], device=self.model.device)
        hidden = self.model(tokens, context, context.ends)
        return self.model.head(hidden).float()  # type: ignore[no-any-return]


class CachedReader:
    """Computes the logits of `WholeReader` by a KV cache. Between calls a sequence grows by one token or has ended."""

    def __init__(self, model: Fallback):
        self.model = model
        self.mask = torch.empty(0)  # (rows, tokens so far), 0 on padding: before sequences, and after those that ended
        self.sizes = torch.empty(0)  # (rows, 1), of the last call
        self.cache: Any = None
        self.takes_positions = "position_ids" in inspect.signature(model.inner.base_model.forward).parameters

    @torch.no_grad()
    def __call__(self, sequences: Sequence[list[int]]) -> Tensor:
        device, longest = self.model.device, max(len(sequence) for sequence in sequences)
        sizes = torch.tensor([[len(sequence)] for sequence in sequences], device=device)
        if self.cache is None:
            tokens = [[0] * (longest - len(sequence)) + sequence for sequence in sequences]
            self.mask = (torch.arange(longest, device=device) >= longest - sizes).long()
        else:
            tokens = [sequence[-1:] for sequence in sequences]
            self.mask = torch.cat((self.mask, sizes - self.sizes), dim=1)
        self.sizes = sizes
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -len(tokens[0]) :]
        output = self.model.inner.base_model(
            torch.tensor(tokens, device=device),
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            **({"position_ids": positions} if self.takes_positions else {}),
        )
        self.cache = output.past_key_values
        return self.model.head(output.last_hidden_state[:, -1].to(self.model.dtype)).float()  # type: ignore[no-any-return]


def cache_agrees(model: Fallback) -> bool:
    """True if `CachedReader` and `WholeReader` agree, within a tolerance, on two sequences of unequal length."""
    accepted = inspect.signature(model.inner.base_model.forward).parameters
    if not {"past_key_values", "attention_mask"} <= set(accepted):
        return False
    whole, cached = WholeReader(model), CachedReader(model)
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    sequences = [[1, 2], [3, 4, 5, 6]]
    for token in (0, 1, 2):
        expected = whole(sequences)
        if (cached(sequences) - expected).abs().max() > tolerance * expected.abs().max():
            return False
        sequences = [[*sequence, token] for sequence in sequences]
    return True


class Batch:
    """Drafts that are decoded together until the last of them ends or is given up."""

    def __init__(self, read: WholeReader | CachedReader, drafts: list[Draft], ends: Collection[int]):
        device = read.model.device
        self.read, self.drafts = read, drafts
        self.sequences = [list(draft.prompt) for draft in drafts]
        self.limit = max(draft.limit for draft in drafts)
        self.draw = Draw.of([draft.sampling for draft in drafts], device)
        drawn = [uniforms(draft.sampling, self.limit) for draft in drafts]
        self.uniform = torch.stack(drawn, dim=1).to(device)  # (limit, rows)
        self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self.step = 0

    def advance(self) -> list[tuple[int, float]]:
        """Return the next token of each draft and its log-prob."""
        emitted = torch.full((len(self.drafts),), self.step, device=self.uniform.device)
        logits, uniform = self.read(self.sequences), self.uniform[self.step]
        tokens, logprobs = sample(logits, self.draw, uniform, emitted=emitted, ends=self.ends)
        self.step += 1
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


class StaticEngine(QueuedEngine):
    """An `Engine` on a `Fallback` model whose parameters it shares with the learner."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: TextDecoder,
        *,
        slots: int = 64,
        max_length: int | None = None,
        ends: Collection[int] | None = None,
    ):
        if not isinstance(model, Fallback):
            raise TypeError(f"{type(model).__name__} does not run through transformers: give it to NativeEngine")
        log.warning(
            "Generating through transformers in fixed batches: %s has no native decoder, so this is slower.",
            type(model.inner).__name__,
        )
        super().__init__(
            tokenizer,
            slots=slots,
            max_length=min(max_length or model.max_positions, model.max_positions),
            ends=(*end_tokens(tokenizer), *model.special.eos) if ends is None else ends,
        )
        self.model = model
        self._batch: Batch | None = None
        self._cached: bool | None = None  # result of `cache_agrees`, from the first batch on

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        if weights is not None:
            own = dict(self.model.hf_tensors())
            check_names(weights, own)
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(weights[name])
            check_held(own, weights)
        self._loaded(version)

    def _forget(self) -> None:
        self._batch = None

    def _withdraw(self, drafts: Collection[Draft]) -> None:
        """Do nothing: their rows are computed until the batch ends."""

    def _advance(self) -> None:
        if self._batch is not None and not any(draft in self._queue for draft in self._batch.drafts):
            self._batch = None
        drafts = self._queue.take(self.slots) if self._batch is None else self._batch.drafts
        if not drafts:
            return
        with memory_tried() as failed:
            self._step(drafts)
        if failed:
            self._begin_again(len(drafts))

    def _step(self, drafts: list[Draft]) -> None:
        if self._cached is None:
            self._cached = cache_agrees(self.model)
        if self._batch is None:
            read = CachedReader(self.model) if self._cached else WholeReader(self.model)
            self._batch = Batch(read, drafts, self.ends)
        for draft, sequence, (token, logprob) in zip(drafts, self._batch.sequences, self._batch.advance(), strict=True):
            if draft not in self._queue:
                continue
            if not math.isfinite(logprob):
                raise FloatingPointError(DIVERGED)
            for tokens in (sequence, draft.tokens):
                tokens.append(token)
            draft.logprobs.append(logprob)
            full = len(draft.tokens) >= draft.limit
            if (ending := self._ending(draft, ended=token in self.ends, full=full)) is not None:
                self._answer(draft, *ending)
