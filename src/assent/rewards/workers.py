"""A judge in processes of its own: one call is spread over them, and a lost one is replaced and asked again.

    sequences -> a share for each worker -> `of_sequences` over there -> scores in order

What a judge says depends on a sequence alone, so it does not matter who is asked, or how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from assent.rewards.judge import Tokens
from assent.runtime.worker import Worker, WorkerLost

Start = Callable[[int], Awaitable[Worker]]
"""Starts the worker of a number. Raises WorkerLost where it died on the way, and what makes starting impossible."""


class JudgeWorkers:
    """The `score_batch` of a JudgeReward. Workers start with the first question, and stay."""

    def __init__(self, start: Start, count: int, *, failures: Callable[[WorkerLost], None]):
        """`failures` is told of every lost worker and may raise, which ends the run."""
        self._start, self._failures = start, failures
        self._workers: list[Worker | None] = [None] * count
        self._locks = [asyncio.Lock() for _ in range(count)]

    async def __call__(self, sequences: list[Tokens]) -> list[float]:
        count = min(len(self._workers), len(sequences))
        shares = [sequences[number::count] for number in range(count)]
        found = await asyncio.gather(*(self._scored(number, share) for number, share in enumerate(shares)))
        scores = [0.0] * len(sequences)
        for number, share in enumerate(found):
            scores[number::count] = share
        return scores

    async def _scored(self, number: int, sequences: list[Tokens]) -> list[float]:
        while True:
            try:
                worker = await self._ready(number)
                scores: list[float] = await worker.call("of_sequences", sequences)
            except WorkerLost as lost:
                self._workers[number] = None
                self._failures(lost)
            else:
                if len(scores) != len(sequences):
                    raise ValueError(
                        f"{worker.name} was asked about {len(sequences)} and scored {len(scores)} sequences."
                    )
                return scores

    async def _ready(self, number: int) -> Worker:
        async with self._locks[number]:
            worker = self._workers[number]
            if worker is None:
                worker = self._workers[number] = await self._start(number)
            return worker
