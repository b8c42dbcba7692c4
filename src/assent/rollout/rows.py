"""What the native engine remembers: requests, the sequences of theirs that are being decoded, and the rows' tensors.

Row i of `Rows`, of the cache and of the engine's list of active sequences are the same sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assent.rollout.sampler import uniforms
from assent.types import Completion, Sampling


@dataclass(eq=False, slots=True)
class Request:
    """One `generate` call."""

    tokens: list[int]
    plan: Sequence[Sampling]
    future: asyncio.Future[list[Completion]]
    done: dict[int, Completion] = field(default_factory=dict)
    admitted: int = 0
    first: Tensor | None = None
    """Logits after the prompt (vocab,), while samples still wait; used while a row of this version holds the prompt."""


@dataclass(eq=False, slots=True)
class Active:
    """One active row. After step s of the engine it holds s - born tokens of its own."""

    request: Request
    member: int
    limit: int
    born: int
    version: int
    """Of the weights that computed its prompt."""

    @property
    def sampling(self) -> Sampling:
        return self.request.plan[self.member]


@dataclass(slots=True)
class Admission:
    """What joins the active sequences in one step."""

    sequences: list[Active] = field(default_factory=list)
    """In the order of their rows, which follow the active ones."""
    fresh: list[int] = field(default_factory=list)
    """Rows whose prompt is computed now."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """The row that holds a prompt, and the row that needs it."""


@dataclass(slots=True)
class Counts:
    """What an engine has done so far. An active row gets a token a step: tokens / steps rows were busy on average."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    """Of prompts that were computed; samples that share one do not count it again."""


class Rows:
    """What is being sampled, one row a sequence, on the device: nothing leaves it before the sequence ends."""

    def __init__(self, slots: int, length: int, device: torch.device):
        def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.length = length
        self.tokens, self.versions = table(slots, length), table(slots, length)
        self.logprobs = table(slots, length, dtype=torch.float32)
        self.uniforms = table(slots, length, dtype=torch.float32)
        self.emitted, self.limit, self.prompt, self.last = (table(slots) for _ in range(4))  # all (slots,)

    def tables(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.versions, self.logprobs, self.uniforms)

    def grown(self, length: int) -> Rows:
        larger = Rows(len(self.last), length, self.last.device)
        for old, new in zip(self.tables(), larger.tables(), strict=True):
            new[:, : self.length] = old
        larger.emitted, larger.limit, larger.prompt, larger.last = self.emitted, self.limit, self.prompt, self.last
        return larger

    def move(self, sources: list[int], targets: list[int]) -> None:
        for tensor in (*self.tables(), self.emitted, self.limit, self.prompt, self.last):
            tensor[targets] = tensor[sources]

    def start(self, base: int, sequences: Sequence[Active]) -> None:
        """Rows from `base` on belong to these new sequences."""
        part = slice(base, base + len(sequences))
        device = self.last.device
        self.emitted[part] = 0
        self.limit[part] = torch.tensor([sequence.limit for sequence in sequences], device=device)
        self.prompt[part] = torch.tensor([len(sequence.request.tokens) for sequence in sequences], device=device)
        for row, sequence in enumerate(sequences, base):
            self.uniforms[row, : sequence.limit] = uniforms(sequence.sampling, sequence.limit)
