"""A learned reward model as a Reward: requests of many groups are scored together.

    score (one group) -> pending -> one flush for all that wait -> score_batch -> one Score each

Left out: the model itself. `score_batch` turns token sequences into numbers, at once or as a coroutine, in this process
or another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from plaudit.rewards.base import completed
from plaudit.runtime.queue import Queue
from plaudit.types import Completion, Prompt, Score

Tokens = tuple[int, ...]
ScoreBatch = Callable[[list[Tokens]], list[float] | Awaitable[list[float]]]

GRACE = 2
"""Turns of the event loop after the engine went idle, so that its last answers get into the batch."""


@dataclass(eq=False, slots=True)
class _Question:
    sequence: Tokens


class JudgeReward:
    """Scores prompt and completion together, read out at the last token.

    - `batch`: sequences worth scoring at once. While fewer wait and `busy()` says that more may come (the engine still
      decodes), scoring waits, `pause` seconds at a time. Then everything pending is scored in the order of asking, so
      that equal runs batch alike.
    - `encode` writes prompt and completion in the form of the judge's training, since a judge is markedly worse on
      other forms. It raises ValueError for what cannot be written so. Without it the judge reads the sampled tokens.
    - `longest`: positions of the judge; a longer text gets no score.
    """

    def __init__(
        self,
        score_batch: ScoreBatch,
        *,
        batch: int = 64,
        busy: Callable[[], bool] = lambda: False,
        pause: float = 0.0,
        encode: Callable[[Prompt, Completion], Tokens] | None = None,
        longest: int | None = None,
    ):
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1, the number of sequences that the judge scores at once")
        self.score_batch, self.batch, self.busy, self.pause = score_batch, batch, busy, pause
        self.encode, self.longest = encode, math.inf if longest is None else longest
        self._queue: Queue[_Question, float] = Queue(self._flush)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return await completed([self.read(prompt, completion) for completion in completions], self.scored)

    def read(self, prompt: Prompt, completion: Completion) -> Tokens | Score:
        """Return the tokens that the judge reads, or a failed score if it cannot read them."""
        if self.encode is None:
            return self.refused((*prompt.tokens, *completion.tokens))
        try:
            return self.refused(self.encode(prompt, completion))
        except (ValueError, TypeError) as error:  # its chat template refuses the chat, or a text is not Unicode
            return Score(value=None, reason=f"cannot be read: {error!s:.200}")

    def refused(self, sequence: Tokens) -> Tokens | Score:
        """Return the sequence, or a failed score if the judge has no positions for it."""
        if 0 < len(sequence) <= self.longest:
            return sequence
        return Score(value=None, reason=f"{len(sequence)} tokens, the judge reads 1 to {self.longest}")

    async def scored(self, sequences: list[Tokens]) -> list[Score]:
        """Score sequences, together with those that others ask about meanwhile."""
        return [_score(value) for value in await self._queue.ask([_Question(sequence) for sequence in sequences])]

    async def _flush(self) -> None:
        """Takes: waiting questions. Waits for: a full batch or an idle engine. Gives: a score each."""
        while self._queue.open:
            idle = 0
            while idle < GRACE and len(self._queue.waiting) < self.batch:
                await asyncio.sleep(self.pause)
                idle = 0 if self.busy() else idle + 1
            questions = self._queue.take()
            if not questions:  # all were given up meanwhile
                return
            found = self.score_batch([question.sequence for question in questions])
            values = await found if isinstance(found, Awaitable) else found
            if len(values) != len(questions):
                raise ValueError(
                    f"The judge was asked about {len(questions)} sequences and answered with {len(values)} scores."
                )
            for question, value in zip(questions, values, strict=True):
                self._queue.answer(question, value)
            await asyncio.sleep(0)


def _score(value: float) -> Score:
    if not math.isfinite(value):
        return Score(value=None, reason=f"the judge's score is {value}")
    return Score(value=value)
