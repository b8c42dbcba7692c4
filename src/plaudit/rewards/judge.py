"""A learned reward model as a Reward: requests of many groups are scored together.

    score (one group) -> pending -> one flush for all that wait -> score_batch -> one Score each

Left out: the model itself. `score_batch` is whatever turns token sequences into numbers, at once or as a coroutine: a
scorer here, in a thread, or in another process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from plaudit.runtime.coroutines import Background
from plaudit.types import Completion, Finish, Prompt, Score

Tokens = tuple[int, ...]
ScoreBatch = Callable[[list[Tokens]], list[float] | Awaitable[list[float]]]

GRACE = 2
"""Turns of the loop after the engine went idle, in which those it answered last get to ask for their scores."""


@dataclass(eq=False, slots=True)
class _Request:
    sequences: list[Tokens]
    future: asyncio.Future[list[float]]


class JudgeReward:
    """Scores prompt and completion together, read out at the last token.

    batch: sequences worth scoring at once. While fewer wait and `busy()` says that more may come (the engine still
    decodes), scoring waits, `pause` seconds at a time; then everything pending is scored, in the order of asking, so
    that equal runs batch alike.
    encode: the judge's own tokens of a prompt and a completion, where its tokenizer is not the policy's.
    append_eos: the token that ended the texts the judge was trained on. A completion cut by length or by a stop string,
    and whatever `encode` made, gets it: a judge asked about texts unlike its own is markedly worse.
    longest: tokens that the judge has positions for; a longer text gets no score.
    """

    def __init__(
        self,
        score_batch: ScoreBatch,
        *,
        batch: int = 64,
        busy: Callable[[], bool] = lambda: False,
        pause: float = 0.0,
        encode: Callable[[Prompt, Completion], Tokens] | None = None,
        append_eos: int | None = None,
        longest: int | None = None,
    ):
        if batch < 1:
            raise ValueError(f"batch={batch}: the judge scores at least one sequence at once. Give 1 or more.")
        self.score_batch, self.batch, self.busy, self.pause = score_batch, batch, busy, pause
        self.encode, self.append_eos, self.longest = encode, append_eos, math.inf if longest is None else longest
        self._pending: list[_Request] = []
        self._flush = Background(self._flush_pending, self._fail)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        sequences = [self.sequence(prompt, completion) for completion in completions]
        scores = iter(await self.scored([sequence for sequence in sequences if self.refused(sequence) is None]))
        return [self.refused(sequence) or next(scores) for sequence in sequences]

    def refused(self, sequence: Tokens) -> Score | None:
        """The score of what the judge cannot read."""
        if 0 < len(sequence) <= self.longest:
            return None
        return Score(value=None, reason=f"{len(sequence)} tokens, the judge reads 1 to {self.longest}")

    async def scored(self, sequences: list[Tokens]) -> list[Score]:
        """Scores of what the judge is to read, together with what others ask about meanwhile."""
        if not sequences:
            return []
        loop = asyncio.get_running_loop()
        request = _Request(sequences, loop.create_future())
        self._pending.append(request)
        self._flush.wake()
        try:
            return [_score(value) for value in await request.future]
        except asyncio.CancelledError:
            if request in self._pending:
                self._pending.remove(request)
            raise

    def sequence(self, prompt: Prompt, completion: Completion) -> Tokens:
        """What the judge reads."""
        if self.encode is not None:
            tokens = tuple(self.encode(prompt, completion))  # of a text, which never shows the end token
        else:
            tokens = (*prompt.tokens, *completion.tokens)
            if completion.finish is Finish.EOS:
                return tokens
        if self.append_eos is None or tokens[-1:] == (self.append_eos,):
            return tokens
        return (*tokens, self.append_eos)

    async def _flush_pending(self) -> None:
        """Takes what is pending; waits, a turn of the loop at a time, for a full batch or an idle engine."""
        while self._pending:
            idle = 0
            while idle < GRACE and sum(len(request.sequences) for request in self._pending) < self.batch:
                await asyncio.sleep(self.pause)
                idle = 0 if self.busy() else idle + 1
            requests = list(self._pending)
            if not requests:  # all were cancelled meanwhile
                return
            found = self.score_batch([sequence for request in requests for sequence in request.sequences])
            values = await found if isinstance(found, Awaitable) else found
            total = sum(len(request.sequences) for request in requests)
            if len(values) != total:
                raise ValueError(f"The judge was asked about {total} sequences and answered with {len(values)} scores.")
            self._pending = [request for request in self._pending if request not in requests]  # some came meanwhile
            start = 0
            for request in requests:
                end = start + len(request.sequences)
                if not request.future.done():
                    request.future.set_result(values[start:end])
                start = end
            await asyncio.sleep(0)

    def _fail(self, error: BaseException | None) -> None:
        """Give everyone who waits the error, or cancel them for None."""
        pending, self._pending = self._pending, []
        for request in pending:
            if not request.future.done():
                request.future.cancel() if error is None else request.future.set_exception(error)


def _score(value: float) -> Score:
    if not math.isfinite(value):
        return Score(value=None, reason=f"the judge's score is {value}")
    return Score(value=value)
