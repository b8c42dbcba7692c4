"""A judge in processes of its own: one call is spread over those that live, and a lost one is replaced.

    sequences -> a share for each worker -> `of_sequences` over there -> scores in order
    a worker is lost -> its share is spread over the others, and waits only where none is left

What a judge says depends on a sequence alone, so it does not matter who is asked, beside what, or how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plaudit.rewards.judge import Tokens
from plaudit.runtime.places import Place, Places, Start
from plaudit.runtime.worker import NoWorkersError, WorkerLost


class JudgeWorkers:
    """The `score_batch` of a JudgeReward. Workers start with `open`, or else with the first question, and stay."""

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """Where none is left, questions wait `patience` seconds. `failures` is told of every lost worker and may raise,
        which ends the run."""
        self._places = Places(start, count, work="questions", failures=failures, say=say)
        self._patience = patience

    def open(self) -> None:
        """Begin to start workers, within a running event loop. Once is enough."""
        self._places.open()

    async def __call__(self, sequences: list[Tokens]) -> list[float]:
        self.open()
        return await self._spread(sequences)

    async def _spread(self, sequences: list[Tokens]) -> list[float]:
        places = (await self._ready())[: len(sequences)]
        shares = [sequences[number :: len(places)] for number in range(len(places))]
        found = await asyncio.gather(*(self._asked(place, mine) for place, mine in zip(places, shares, strict=True)))
        scores = [0.0] * len(sequences)
        for number, share in enumerate(found):
            scores[number :: len(places)] = share
        return scores

    async def _asked(self, place: Place, sequences: list[Tokens]) -> list[float]:
        """What a place's worker says, or if it is lost the others."""
        worker = place.worker
        if worker is None:  # lost since it was chosen
            return await self._spread(sequences)
        place.load += len(sequences)
        try:
            scores: list[float] = await worker.call("of_sequences", sequences)
        except WorkerLost as lost:
            self._places.lose(place, worker, lost)
            return await self._spread(sequences)
        finally:
            place.load -= len(sequences)
        if len(scores) != len(sequences):
            raise ValueError(f"{worker.name} was asked about {len(sequences)} and scored {len(scores)} sequences.")
        return scores

    async def _ready(self) -> list[Place]:
        try:
            return await self._places.free(patience=self._patience, all_tried=True)
        except TimeoutError:
            raise NoWorkersError(
                f"no judge became ready within {self._patience:g} s, twice runtime.start_timeout (for its "
                "room, and for loading): free what `resources` of the reward asks for, or raise it"
            ) from None

    def close(self) -> None:
        self._places.close("the judges were")
