"""A judge in processes of its own: one call is spread over those that live, and a lost one is replaced.

    sequences -> a share for each worker -> `of_sequences` over there -> scores in order
    a worker is lost -> its share is spread over the others, and waits only where none is left

What a judge says depends on a sequence alone, so it does not matter who is asked, beside what, or how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from assent.rewards.judge import Tokens
from assent.runtime.worker import NodeLost, NoWorkersError, Worker, WorkerLost

Start = Callable[[int], Awaitable[Worker]]
"""Starts the worker of a number. Raises WorkerLost where it died on the way, and what makes starting impossible."""
PAUSE = 0.2
"""Seconds between two starts of a place whose node is gone, until the runtime has found it another."""


@dataclass(eq=False, slots=True)
class _Place:
    number: int
    worker: Worker | None = None
    tried: bool = False
    """It has been started once, well or not."""
    load: int = 0
    """Sequences that its worker was asked about and has not answered."""


class JudgeWorkers:
    """The `score_batch` of a JudgeReward. Workers start with the first question, and stay."""

    def __init__(self, start: Start, count: int, *, patience: float, failures: Callable[[WorkerLost], None]):
        """Where none is left, questions wait `patience` seconds for each start. `failures` is told of every lost worker
        and may raise, which ends the run."""
        self._start, self._patience, self._failures = start, patience, failures
        self._places = [_Place(number) for number in range(count)]
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._begun = False

    async def __call__(self, sequences: list[Tokens]) -> list[float]:
        if not self._begun:
            self._begun = True
            for place in self._places:
                self._fill_in_background(place)
        return await self._spread(sequences)

    async def _spread(self, sequences: list[Tokens]) -> list[float]:
        places = (await self._ready())[: len(sequences)]
        shares = [sequences[number :: len(places)] for number in range(len(places))]
        found = await asyncio.gather(*(self._asked(place, mine) for place, mine in zip(places, shares, strict=True)))
        scores = [0.0] * len(sequences)
        for number, share in enumerate(found):
            scores[number :: len(places)] = share
        return scores

    async def _asked(self, place: _Place, sequences: list[Tokens]) -> list[float]:
        """What a place's worker says, or if it is lost the others."""
        worker = place.worker
        if worker is None:  # lost since it was chosen
            return await self._spread(sequences)
        place.load += len(sequences)
        try:
            scores: list[float] = await worker.call("of_sequences", sequences)
        except WorkerLost as lost:
            self._lose(place, worker, lost)
            return await self._spread(sequences)
        finally:
            place.load -= len(sequences)
        if len(scores) != len(sequences):
            raise ValueError(f"{worker.name} was asked about {len(sequences)} and scored {len(scores)} sequences.")
        return scores

    async def _ready(self) -> list[_Place]:
        """Takes: nothing. Waits for: a first start of all, then for any worker. Woken by: every start's end. Gives: the
        places of those that live, the least busy first."""
        async with self._changed:
            while True:
                if self._broken is not None:
                    raise self._broken
                found = [place for place in self._places if place.worker is not None]
                if found and all(place.tried for place in self._places):
                    return sorted(found, key=lambda place: (place.load, place.number))
                try:
                    await asyncio.wait_for(self._changed.wait(), self._patience)
                except TimeoutError:
                    raise NoWorkersError(
                        f"no judge became ready within {self._patience:g} s, twice runtime.start_timeout (for its "
                        "room, and for loading): free what `resources` of the reward asks for, or raise it"
                    ) from None

    def _lose(self, place: _Place, worker: Worker, lost: WorkerLost) -> None:
        """Take a worker out once, however many of its callers notice, and start another in its place."""
        if place.worker is not worker or self._broken is not None:
            return
        place.worker = None
        self._note(lost)
        self._fill_in_background(place)

    def _note(self, lost: WorkerLost) -> None:
        try:
            self._failures(lost)
        except RuntimeError as enough:
            self._broken = enough

    def _fill_in_background(self, place: _Place) -> None:
        task = asyncio.get_running_loop().create_task(self._fill(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fill(self, place: _Place) -> None:
        """Takes: an empty place. Waits for: its worker, as many starts as it takes. Gives: a ready worker."""
        while self._broken is None:
            pause = 0.0
            try:
                place.worker = await self._start(place.number)
                break  # it may be lost before all are told: then another one fills its place
            except NodeLost:
                pause = PAUSE
            except WorkerLost as lost:
                self._note(lost)
            except Exception as error:  # noqa: BLE001 - whoever asks is told
                self._broken = error
            await self._tell(place)
            await asyncio.sleep(pause)
        await self._tell(place)

    async def _tell(self, place: _Place) -> None:
        place.tried = True
        async with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Start no others; those that end now are no loss."""
        self._broken = self._broken or RuntimeError("the judges were closed")
        for task in self._tasks:
            task.cancel()
