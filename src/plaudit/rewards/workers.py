"""A judge in several worker processes: a call is spread over the live workers, and a lost worker is replaced.

    sequences -> a share for each worker -> `of_sequences` in the worker -> scores in order
    a worker is lost -> another worker gets its share; if none is left, the share waits

A score depends only on its sequence, so it does not matter which worker is asked, in which batch, or how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from plaudit.rewards.judge import Tokens
from plaudit.runtime.places import Place, Places, Start
from plaudit.runtime.worker import WorkerLost


class Scores(Protocol):
    """The method that is called in a judge's process."""

    def of_sequences(self, sequences: list[Tokens]) -> list[float]: ...


class JudgeWorkers:
    """The `score_batch` of a JudgeReward. Workers start at `open` or the first call, and keep running."""

    def __init__(
        self,
        start: Start[Scores],
        count: int,
        *,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """If no worker is left, calls wait at most `patience` seconds. `failures` is called with every lost worker and
        may raise, which ends the run."""
        none = (
            "no judge became ready within {patience:g} s, which is twice runtime.start_timeout (for reserving and for "
            "loading): free what the reward's `resources` reserve, or raise runtime.start_timeout"
        )
        self._places = Places(start, count, work="questions", patience=patience, none=none, failures=failures, say=say)

    def open(self) -> None:
        """Begin to start workers, within a running event loop. Further calls do nothing."""
        self._places.open()

    async def __call__(self, sequences: list[Tokens]) -> list[float]:
        self.open()
        places = (await self._places.free(all_tried=True))[: len(sequences)]
        shares = [sequences[number :: len(places)] for number in range(len(places))]
        found = await asyncio.gather(*(self._asked(place, mine) for place, mine in zip(places, shares, strict=True)))
        scores = [0.0] * len(sequences)
        for number, share in enumerate(found):
            scores[number :: len(places)] = share
        return scores

    async def _asked(self, place: Place[Scores], sequences: list[Tokens]) -> list[float]:
        """Return scores from a place's worker or, if that worker is lost, from another one."""
        scores = await self._places.asked(
            len(sequences), lambda one: one.call(Scores.of_sequences, sequences), first=place
        )
        if len(scores) != len(sequences):
            raise ValueError(f"A judge was asked about {len(sequences)} and scored {len(scores)} sequences.")
        return scores

    def close(self) -> None:
        self._places.close("the judges were")
