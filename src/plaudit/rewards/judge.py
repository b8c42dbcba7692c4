"""A learned reward model as a Reward, which scores the requests of many groups together.

    score (one group) -> queue -> one flush for all waiting sequences -> score_batch -> one Score each

Left out: the model itself. `score_batch` turns token sequences into numbers. It may be a function or a coroutine, and
compute in this process or in others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from plaudit.rewards.base import Timing, completed
from plaudit.runtime.queue import Queue
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Completion, Prompt, Score
from plaudit.types.distant import joined

Tokens = tuple[int, ...]
ScoreBatch = Callable[[list[Tokens]], Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""Function, or coroutine function, that returns a score per sequence; None if a sequence's tokens are lost."""

GRACE = 2
"""Turns of the event loop to wait after the engine became idle, so that its last answers get into the batch."""


@dataclass(eq=False, slots=True)
class _Question:
    sequence: Tokens


class JudgeReward:
    """Scores prompt and completion as one sequence, at its last token.

    - `batch`: number of queued sequences at which scoring begins. While there are fewer and `busy()` is true (the
      engine still decodes, so more may come), it sleeps `pause` seconds at a time. Then it scores all queued sequences
      in the order of the requests, so that equal runs form equal batches.
    - `encode` renders prompt and completion in the form of the judge's training, since a judge is much worse on other
      forms. It raises ValueError if that is impossible. Without it the judge reads the sampled tokens.
    - `longest`: the judge's context length in tokens; a longer sequence gets no score.
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
        self.doing: Timing = nullcontext  # active while it scores, not while it waits
        self._queue: Queue[_Question, float | None] = Queue(self._flush)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return await completed([self.read(prompt, completion) for completion in completions], self.scored)

    def read(self, prompt: Prompt, completion: Completion) -> Tokens | Score:
        """Return the tokens that the judge reads, or a failed score if it cannot read them."""
        if self.encode is None:
            return self.refused(joined(prompt.tokens, completion.tokens))
        try:
            return self.refused(self.encode(prompt, completion))
        except (ValueError, TypeError) as error:  # its chat template refuses the chat, or a text is not Unicode
            return Score(value=None, reason=f"cannot be read: {error!s:.200}")

    def refused(self, sequence: Tokens) -> Tokens | Score:
        """Return the sequence, or a failed score if it is empty or longer than `longest`."""
        if 0 < len(sequence) <= self.longest:
            return sequence
        return Score(value=None, reason=f"{len(sequence)} tokens, the judge reads 1 to {self.longest}")

    async def scored(self, sequences: list[Tokens]) -> list[Score]:
        """Score sequences, in batches with those of other callers. Raises AnswersLost if the tokens of one are lost."""
        return [_score(value) for value in await self._queue.ask([_Question(sequence) for sequence in sequences])]

    async def _flush(self) -> None:
        """Takes: waiting sequences. Waits for: a full batch or an idle engine. Gives: one score each."""
        while self._queue.open:
            idle = 0
            while idle < GRACE and len(self._queue.waiting) < self.batch:
                await asyncio.sleep(self.pause)
                idle = 0 if self.busy() else idle + 1
            if not (questions := self._queue.take()):  # all requests were cancelled meanwhile
                return
            with self.doing():
                found = self.score_batch([question.sequence for question in questions])
                values = await found if isinstance(found, Awaitable) else found
            if len(values) != len(questions):
                raise ValueError(
                    f"The judge was asked about {len(questions)} sequences and answered with {len(values)} scores."
                )
            for question, value in zip(questions, values, strict=True):
                self._queue.answer(question, value)
            await asyncio.sleep(0)


def _score(value: float | None) -> Score:
    if value is None:
        raise AnswersLost("answers on a node", "their node is gone")
    if not math.isfinite(value):
        return Score(value=None, reason=f"the judge's score is {value}")
    return Score(value=value)
