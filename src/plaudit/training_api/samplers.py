"""What answers sampling requests: the base model, or with it saved adapters, and the engines on them.

Question -> Sampler: scored (the prompt's log-probs), an engine for each set of end tokens -> answers
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plaudit.batch import Batch
from plaudit.learn.scorer import Scorer
from plaudit.models.decoder import Decoder
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.rollouter import completion_seed
from plaudit.rollout.text import end_tokens
from plaudit.training_api.adapters import adapted
from plaudit.training_api.wire import Array
from plaudit.types import Completion, Role, Sampling

SLOTS = 64
"""Answers that an engine decodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A sampling request. `ends`: tokens that end an answer besides the model's own; None: no token ends one."""

    prompt: Sequence[int]
    sampling: Sampling
    count: int
    ends: frozenset[int] | None
    scored: int
    """Number of the prompt's last tokens whose log-probs are asked for."""


class Sampler:
    """One version of weights to sample from: the base model's, or with `fill`, which writes adapters of this rank into
    a model. Nothing is loaded before it is asked."""

    def __init__(self, base: Decoder, tokenizer: Any, fill: Callable[[Decoder], object] | None = None, rank: int = 0):
        self._base, self._tokenizer, self._fill, self._rank = base, tokenizer, fill, rank
        self._model: Decoder | None = None
        self._engines: dict[frozenset[int] | None, NativeEngine] = {}
        self._waiting: list[tuple[Question, list[Array]]] = []

    @property
    def model(self) -> Decoder:
        if self._model is None:
            self._model = self._base if self._fill is None else adapted(self._base, self._rank).requires_grad_(False)
            if self._fill is not None:
                self._fill(self._model)
        return self._model

    async def answers(self, asked: Question) -> list[Completion]:
        if asked.ends not in self._engines:
            usual = frozenset({*end_tokens(self._tokenizer), *self.model.special.eos})
            ends = frozenset[int]() if asked.ends is None else usual | asked.ends
            self._engines[asked.ends] = NativeEngine(self.model, self._tokenizer, slots=SLOTS, ends=ends)
        seeds = [completion_seed(asked.sampling.seed, 0, number) for number in range(asked.count)]
        plan = [replace(asked.sampling, seed=seed) for seed in seeds]
        return await self._engines[asked.ends].generate(asked.prompt, plan)

    async def scores(self, asked: Question, turn: Callable[[Callable[[], None]], Awaitable[None]]) -> Array:
        """Return the log-probs of the prompt's last tokens, (p,), NaN for the others and the first token. All that wait
        for their `turn` are computed together."""
        found: list[Array] = []
        self._waiting.append((asked, found))
        await turn(self._score)
        if not found:
            raise RuntimeError("the prompts that were scored together do not fit in memory")
        return found[0]

    def _score(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        sizes = torch.tensor([len(asked.prompt) for asked, _ in waiting])
        first = torch.tensor([max(1, len(asked.prompt) - asked.scored) for asked, _ in waiting])
        wanted = torch.cat([torch.arange(size) for size in sizes.tolist()]) >= first.repeat_interleave(sizes)
        tokens = torch.tensor([token for asked, _ in waiting for token in asked.prompt])
        batch = Batch(tokens=tokens, trainable=wanted, lengths=sizes, group=torch.arange(len(waiting)))
        logprobs = torch.where(wanted, Scorer(self.model, Role.POLICY).columns(batch)["proximal"], torch.nan)
        for (_, found), column in zip(waiting, torch.split(logprobs, sizes.tolist()), strict=True):
            found.append(column.numpy())

    def rest(self) -> None:
        """Drop the engines that are idle, and their memory: each holds packed weights and a cache."""
        before = len(self._engines)
        self._engines = {ends: engine for ends, engine in self._engines.items() if engine.busy}
        if len(self._engines) < before:
            gc.collect()  # an engine and its queue refer to each other
