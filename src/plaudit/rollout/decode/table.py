"""The drafts that the native engine decodes side by side. Entry i of the drafts, row i of the tensors and slot i of the
cache belong together.

    join (after the running ones) -> resume, start -> a token a step -> remove (the last ones close the gaps)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from plaudit.models.config import DecoderConfig
from plaudit.rollout.decode.kept import Turn
from plaudit.rollout.decode.pages import make_cache
from plaudit.rollout.queued import Draft
from plaudit.rollout.sampler import Draw, uniforms

LENGTH_STEP = 64
"""Cache and rows grow in multiples of this many tokens."""


class Table:
    """Active drafts fill the first rows. The drafts in `first` decide the length of cache and rows; `join` grows it."""

    def __init__(
        self, config: DecoderConfig, slots: int, first: Sequence[Draft], *, dtype: torch.dtype, device: torch.device
    ):
        total, answer = _lengths(first)
        self.config, self.slots, self.dtype = config, slots, dtype
        self.cache = make_cache(config, slots, total, dtype=dtype, device=device)
        self.rows = Rows(slots, answer, device)
        self.drafts: list[Draft] = []
        self.draw = Draw.of([])

    def join(self, drafts: Sequence[Draft]) -> None:
        """Reserve the rows after the running ones for these drafts; make cache and rows longer if they need it."""
        total, answer = _lengths(drafts)
        if self.cache.length < total:
            self.cache = self.cache.grown(self.config, total)
        if self.rows.length < answer:
            self.rows = self.rows.grown(answer)
        self.drafts += drafts

    def resume(self, running: int, turns: Sequence[Turn]) -> None:
        """Write the cache of these finished turns into the rows after the first `running`, whose drafts go on."""
        for row, turn in enumerate(turns, running):
            self.cache.put(row, turn.parts, len(turn.tokens))
            self.drafts[row].read = len(turn.tokens) - turn.first + 1
        self.rows.start(running, self.drafts[running : running + len(turns)])

    def start(self, running: int, copies: Sequence[tuple[int, int]]) -> None:
        """Prepare the rows of the drafts that joined after the first `running`. `copies`: pairs of a row whose cache
        holds a prompt, and a row that needs it."""
        if copies:
            sources, targets = zip(*copies, strict=True)
            self.cache.copy(sources, targets, max(len(self.drafts[row].prompt) for row in sources))
        self.rows.start(running, self.drafts[running:])
        self._draw()

    def longest(self, count: int) -> int:
        """Return the tokens, prompt and answer, of the longest of the first `count` rows; 0 for no rows."""
        return max((draft.length for draft in self.drafts[:count]), default=0)

    def newest(self, count: int, longest: int) -> tuple[Tensor, Tensor]:
        """Return the newest tokens and their positions (at most longest - 1), both (count,), of the first rows."""
        rows = self.rows
        # An idle row is at its last sequence's end. Past `longest`, with a window, it would see nothing and write NaN,
        # which the next sequence there would read, although masked.
        return rows.last[:count], (rows.prompt[:count] + rows.emitted[:count] - 1).clamp_(0, longest - 1)

    def remove(self, gone: Collection[int]) -> None:
        """Free these rows, and close the gaps by moving the last rows into them."""
        left = len(self.drafts) - len(gone)
        gaps = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, len(self.drafts)) if row not in gone]
        if gaps:
            self.cache.move(movers, gaps, max(self.drafts[row].length for row in movers))
            self.rows.move(movers, gaps)
            for gap, mover in zip(gaps, movers, strict=True):
                self.drafts[gap] = self.drafts[mover]
        del self.drafts[left:]
        self._draw()

    def _draw(self) -> None:
        self.draw = Draw.of([draft.sampling for draft in self.drafts], self.rows.last.device)


def _lengths(drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return the most tokens that a draft (prompt and answer) and an answer may get, in multiples of LENGTH_STEP."""
    total = max(draft.most for draft in drafts)
    answer = max(draft.limit for draft in drafts)
    return -(-total // LENGTH_STEP) * LENGTH_STEP, -(-answer // LENGTH_STEP) * LENGTH_STEP


class Rows:
    """The state of sampling, one row a draft. It stays on the device; log-probs leave it when a draft ends."""

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

    def start(self, base: int, drafts: Sequence[Draft]) -> None:
        """Write the sampling state of these new drafts into the rows from `base` on."""
        if not drafts:
            return
        part = slice(base, base + len(drafts))
        last = [draft.further[draft.read - 1] if draft.read else 0 for draft in drafts]
        sizes = [[draft.limit for draft in drafts], [draft.length for draft in drafts], last]
        self.emitted[part] = 0
        self.limit[part], self.prompt[part], self.last[part] = torch.tensor(sizes, device=self.last.device)
        drawn = torch.zeros(len(drafts), max(sizes[0]))
        for row, draft in enumerate(drafts):
            drawn[row, : draft.limit] = uniforms(draft.sampling, draft.limit)
        self.uniforms[part, : drawn.shape[1]] = drawn.to(self.last.device)

    def drawn(self, tokens: Tensor, given: Sequence[int]) -> None:
        """Store the newest token (n,) of the first n rows. In the rows `given` it is the prompt's, not sampled."""
        n = len(tokens)
        self.last[:n] = tokens
        self.emitted[:n] += 1
        if given:
            place = torch.tensor(given, device=tokens.device)
            self.emitted[place] -= 1
            self.prompt[place] += 1

    def logprobs_of(self, rows: Sequence[int], longest: int) -> list[list[float]]:
        """Return the first `longest` log-probs of each of these rows."""
        place = torch.tensor(rows, device=self.last.device)
        found: list[list[float]] = self.logprobs[:, :longest].index_select(0, place).tolist()
        return found
