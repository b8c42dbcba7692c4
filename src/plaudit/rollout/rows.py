"""What the native engine remembers: requests, the sequences of theirs that are being decoded, and the rows' tensors.

Row i of `Rows`, of the cache and of the engine's list of active sequences are the same sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plaudit.rollout.sampler import uniforms
from plaudit.types import Completion, Sampling


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
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token; the newest tokens may lack theirs."""

    @property
    def sampling(self) -> Sampling:
        return self.request.plan[self.member]

    def drawn_by(self, version: int) -> list[int]:
        """`versions`, after tokens that lack theirs got this one."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))
        return self.versions


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
    """What is being sampled, one row a sequence, on the device: log-probs leave it as a sequence ends."""

    def __init__(self, slots: int, length: int, device: torch.device):
        def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.length = length
        self.logprobs, self.uniforms = (table(slots, length, dtype=torch.float32) for _ in range(2))
        self.emitted, self.limit, self.prompt, self.last = (table(slots) for _ in range(4))  # all (slots,)

    def grown(self, length: int) -> Rows:
        larger = Rows(len(self.last), length, self.last.device)
        larger.logprobs[:, : self.length], larger.uniforms[:, : self.length] = self.logprobs, self.uniforms
        larger.emitted, larger.limit, larger.prompt, larger.last = self.emitted, self.limit, self.prompt, self.last
        return larger

    def move(self, sources: list[int], targets: list[int]) -> None:
        source, target = torch.tensor([sources, targets], device=self.last.device)
        for tensor in (self.logprobs, self.uniforms, self.emitted, self.limit, self.prompt, self.last):
            tensor[target] = tensor[source]

    def start(self, base: int, sequences: Sequence[Active]) -> None:
        """Rows from `base` on belong to these new sequences."""
        part = slice(base, base + len(sequences))
        sizes = [[sequence.limit for sequence in sequences], [len(sequence.request.tokens) for sequence in sequences]]
        self.emitted[part] = 0
        self.limit[part], self.prompt[part] = torch.tensor(sizes, device=self.last.device)
        drawn = torch.zeros(len(sequences), max(sizes[0]))
        for row, sequence in enumerate(sequences):
            drawn[row, : sequence.limit] = uniforms(sequence.sampling, sequence.limit)
        self.uniforms[part, : drawn.shape[1]] = drawn.to(self.last.device)

    def logprobs_of(self, rows: Sequence[int], longest: int) -> list[list[float]]:
        """The first `longest` of each of these rows."""
        place = torch.tensor(rows, device=self.last.device)
        found: list[list[float]] = self.logprobs[:, :longest].index_select(0, place).tolist()
        return found
