"""Many rollout workers as one engine, which goes on when some of them are lost.

    generate -> the least busy worker -> completion; if it is lost, its requests go to others and a new one starts
    publish(parcel) -> load on every worker -> version and digest confirmed

What is drawn depends on seed, prompt and weights alone, so a request may be asked again of any worker. A new worker
answers only after it confirmed the newest weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from assent.rollout.accepted import WeightsError
from assent.runtime.worker import Worker, WorkerLost
from assent.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

Start = Callable[[int], Awaitable[Worker]]
"""Starts the worker of a place in the pool; a place keeps its number when its worker is replaced."""


@dataclass(eq=False, slots=True)
class _Place:
    number: int
    worker: Worker | None = None
    load: int = 0
    """Tokens it was asked for and has not answered."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Pool:
    """An `Engine` for whoever asks; weights come by `publish`, not by `load`."""

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`failures` is told of every lost worker and may raise, which ends the run."""
        self._start, self._failures, self._say = start, failures, say
        self._places = [_Place(number) for number in range(count)]
        self._open = 0
        self._parcel: tuple[Any, int, str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._broken: BaseException | None = None
        self.version = 0
        self.lost = 0

    async def open(self) -> None:
        """Start every worker."""
        await asyncio.gather(*(self._fill(place) for place in self._places))

    @property
    def busy(self) -> bool:
        return self._open > 0

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        cost = sum(sampling.max_tokens for sampling in plan)
        self._open += 1
        try:
            while True:
                place = await self._least_busy()
                worker = place.worker
                assert worker is not None
                place.load += cost
                try:
                    answer: list[Completion] = await worker.call("generate", list(prompt_tokens), list(plan))
                except WorkerLost as lost:
                    self._lose(place, worker, lost)
                else:
                    return answer
                finally:
                    place.load -= cost
        finally:
            self._open -= 1

    async def _least_busy(self) -> _Place:
        async with self._changed:
            while True:
                if self._broken is not None:
                    raise self._broken
                able = [place for place in self._places if place.worker is not None]
                if able:
                    return min(able, key=lambda place: (place.load, place.number))
                await self._changed.wait()

    async def publish(self, parcel: Any, version: int, digest: str) -> None:
        """Have every worker take the parcel (or a reference to one) and confirm it; a lost one is replaced."""
        self._parcel, self.version = (parcel, version, digest), version
        await asyncio.gather(*(self._load(place) for place in self._places if place.worker is not None))
        if self._broken is not None:
            raise self._broken

    async def _load(self, place: _Place) -> None:
        worker, parcel = place.worker, self._parcel
        assert worker is not None
        try:
            await self._confirmed(worker, parcel)
        except WorkerLost as lost:
            self._lose(place, worker, lost)

    async def _confirmed(self, worker: Worker, parcel: tuple[Any, int, str] | None) -> None:
        if parcel is None:
            return
        content, version, digest = parcel
        found = await worker.call("load", content)
        if tuple(found) != (version, digest):
            raise WeightsError(f"{worker.name} confirmed weights {found}, but {(version, digest)} were sent.")

    def _lose(self, place: _Place, worker: Worker, lost: WorkerLost) -> None:
        """Take a worker out once, however many of its callers notice, and start another in its place."""
        if place.worker is not worker:
            return
        place.worker = None
        self.lost += 1
        try:
            self._failures(lost)
        except RuntimeError as enough:
            self._broken = enough
        self._say(f"lost {lost}; its prompts are asked again")
        task = asyncio.get_running_loop().create_task(self._replace(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, place: _Place) -> None:
        try:
            if self._broken is None:
                await self._fill(place)
                self._say(f"{place.worker.name if place.worker else 'a worker'} is back")
        except Exception as error:  # noqa: BLE001 - whoever waits for a worker is told
            self._broken = error
        async with self._changed:
            self._changed.notify_all()

    async def _fill(self, place: _Place) -> None:
        worker = await self._start(place.number)
        while True:  # weights may be published while it takes the last ones
            parcel = self._parcel
            await self._confirmed(worker, parcel)
            if parcel is self._parcel:
                break
        place.worker = worker
        async with self._changed:
            self._changed.notify_all()

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        raise NotImplementedError("a pool's weights come by publish()")

    def sleep(self) -> None:
        """Workers have devices of their own."""

    def wake(self) -> None:
        """Nothing slept."""

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
