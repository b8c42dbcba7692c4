"""The engine for models that run through transformers: fixed batches, left padding, transformers' own cache.

    waiting samples -> batches of up to `slots` -> prompt pass, then a step a token until the last of them ends

Slower than `native.py` and says so: a batch ends with its longest answer, finished rows are computed along, each sample
computes its prompt itself. A family whose cache does not reproduce its whole-sequence pass under left padding (a probe
tells) is read anew for every token. Sampling and completions are the same. Left out: refill and prompt sharing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plaudit.models.base import LanguageModel
from plaudit.models.fallback import Fallback
from plaudit.rollout.accepted import check_held, check_names
from plaudit.rollout.engine import TextDecoder, check_request, end_tokens, text_before_stop
from plaudit.rollout.sampler import Draw, sample, uniforms
from plaudit.runtime.coroutines import Background
from plaudit.types import Completion, Finish, Sampling

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Sample:
    """One completion in the making."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class WholeReader:
    """Logits (rows, vocab) after each whole sequence, computed from nothing: right for every model."""

    def __init__(self, model: Fallback):
        self.model = model

    @torch.no_grad()
    def __call__(self, sequences: Sequence[list[int]]) -> Tensor:
        context = self.model.packed([len(sequence) for sequence in sequences])
        tokens = torch.tensor([token for sequence in sequences for token in sequence], device=self.model.device)
        hidden = self.model(tokens, context, context.ends)
        return self.model.head(hidden).float()  # type: ignore[no-any-return]


class CachedReader:
    """The same from transformers' cache. From call to call a sequence grows by one token, or has ended and stays."""

    def __init__(self, model: Fallback):
        self.model = model
        self.mask = torch.empty(0)  # (rows, tokens so far), 0 on padding: in front, and behind sequences that ended
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
        return self.model.head(output.last_hidden_state[:, -1]).float()  # type: ignore[no-any-return]


def cache_agrees(model: Fallback) -> bool:
    """Whether cached and whole reading give the same logits on two short sequences of unequal length."""
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


class StaticEngine:
    """An `Engine` on a `Fallback` model whose parameters it shares with whoever trains it."""

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
            raise TypeError(f"{type(model).__name__} does not run through transformers. Give it to NativeEngine.")
        log.warning(
            "Generating through transformers in fixed batches: %s has no native decoder, so this is slower.",
            type(model.inner).__name__,
        )
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.max_length = min(max_length or model.max_positions, model.max_positions)
        self.ends = frozenset((*end_tokens(tokenizer), *model.special.eos) if ends is None else ends)
        self.version = 0
        self._waiting: list[_Sample] = []
        self._running: list[_Sample] = []
        self._driver = Background(self._drive, self._fail)
        self._asleep = self._drained = False
        self._cached: bool | None = None  # known once a batch has come

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        if self._asleep:
            raise RuntimeError("The engine is asleep or closed. Call wake() before generate().")
        check_request(prompt_tokens, plan, self.max_length)
        loop = asyncio.get_running_loop()
        room = self.max_length - len(prompt_tokens)
        samples = [
            _Sample(list(prompt_tokens), sampling, min(sampling.max_tokens, room), loop.create_future())
            for sampling in plan
        ]
        self._waiting += samples
        if samples:
            self._driver.wake()
        try:
            return list(await asyncio.gather(*(sample.future for sample in samples)))
        except asyncio.CancelledError:
            self._waiting = [sample for sample in self._waiting if sample not in samples]
            raise

    async def drain(self) -> None:
        self._drained = True
        while self._running:
            await asyncio.sleep(0)

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        if weights is not None:
            own = dict(self.model.hf_tensors())
            check_names(weights, own)
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(weights[name])
            check_held(own, weights)
        self.version, self._drained = version, False
        if self._waiting:
            self._driver.wake()

    def sleep(self) -> None:
        if self.busy:
            raise RuntimeError("sleep() while requests are unanswered would lose them. Await them first.")
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self._fail(RuntimeError("The engine was closed before this request was answered."))
        self._asleep = True

    async def _drive(self) -> None:
        """Takes waiting samples, a batch at a time; lets others run between steps; ends when none is left."""
        while self._waiting and not self._drained:
            self._running = self._waiting[: self.slots]
            self._waiting = self._waiting[self.slots :]
            await self._answer(self._running)
            self._running = []

    def _fail(self, error: BaseException | None) -> None:
        samples = self._running + self._waiting
        self._running, self._waiting = [], []
        for one in samples:
            if not one.future.done():
                one.future.cancel() if error is None else one.future.set_exception(error)

    async def _answer(self, batch: list[_Sample]) -> None:
        """Prompt pass and steps of one batch, until every sample has ended or was given up."""
        device = self.model.device
        if self._cached is None:
            self._cached = cache_agrees(self.model)
        read = CachedReader(self.model) if self._cached else WholeReader(self.model)
        sequences = [list(one.prompt) for one in batch]
        draw = Draw.of([one.sampling for one in batch], device)
        limit = max(one.limit for one in batch)
        uniform = torch.stack([uniforms(one.sampling, limit) for one in batch]).to(device)  # (rows, limit)
        ends = torch.tensor(sorted(self.ends), dtype=torch.int64, device=device)
        for step in range(limit):
            emitted = torch.full((len(batch),), step, device=device)
            tokens, logprobs = sample(read(sequences), draw, uniform[:, step], emitted=emitted, ends=ends)
            for one, sequence, token, logprob in zip(batch, sequences, tokens.tolist(), logprobs.tolist(), strict=True):
                if not one.future.done():
                    sequence.append(token)
                    self._append(one, token, logprob)
            await asyncio.sleep(0)
            if all(one.future.done() for one in batch):
                return

    def _append(self, one: _Sample, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            raise FloatingPointError("A sampled log-prob is not finite: the model's weights or logits overflowed.")
        one.tokens.append(token)
        one.logprobs.append(logprob)
        one.versions.append(self.version)
        if token in self.ends:
            self._complete(one, Finish.EOS, self._text(one.tokens[:-1]))
            return
        if (text := text_before_stop(self._text, one.tokens, one.sampling)) is not None:
            self._complete(one, Finish.STOP, text)
        elif len(one.tokens) >= one.limit:
            self._complete(one, Finish.LENGTH, self._text(one.tokens))

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _complete(self, one: _Sample, finish: Finish, text: str) -> None:
        one.future.set_result(
            Completion(
                tokens=tuple(one.tokens),
                logprobs=tuple(one.logprobs),
                versions=tuple(one.versions),
                text=text,
                finish=finish,
            )
        )
