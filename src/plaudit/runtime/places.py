"""Workers that are replaced where they are lost: each has a place, which is filled again.

    open -> start -> a ready worker -> it is lost -> another start, as many as it takes
    free -> places of those that answer, the least busy first

A worker is lost when a call finds it so (`lose`), or the runtime does while nobody calls. Left out: what workers are
asked, and what becomes of a question whose worker is lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Container, Coroutine
from dataclasses import dataclass
from typing import Any

from plaudit.runtime.worker import NodeLost, Worker, WorkerLost, reason_of

Start = Callable[[int], Awaitable[Worker]]
"""Starts the worker of a place and makes it ready, however long it waits for room; a place keeps its number when its
worker is replaced. Raises WorkerLost where it died on the way, and what makes starting impossible."""
PAUSE = 0.2
"""Seconds between two starts of a place whose node is gone, until the runtime has found it another; each time more."""
NODES = 5
"""Starts in a row whose nodes are lost that are no failures: then nodes come and go, and each more is one."""
LONGEST_PAUSE = 60.0
"""Seconds between two starts of a place beyond the count whose workers are lost again and again."""


@dataclass(eq=False, slots=True)
class Place:
    number: int
    worker: Worker | None = None
    tried: bool = False
    """It has been started once, well or not."""
    load: int = 0
    """What its worker was asked for and has not answered."""
    pause: float = 0.0
    """Seconds before the next start."""
    since: float = math.inf
    """When its last worker was ready, by the event loop's clock; inf once that is lost."""


class Places:
    """Where the workers of one kind are."""

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        most: int = 0,
        work: str,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`most` above `count`: the places beyond are filled when there is room and are no failure when lost.
        `failures` is told of every other lost worker and may raise RuntimeError, which ends all. `work` is what they
        are asked, for people."""
        self._start, self._count, self._work = start, count, work
        self._failures, self._say = failures, say
        self.all = [Place(number) for number in range(max(count, most))]
        self.lost = 0
        self._begun = False
        self._broken: BaseException | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to start workers. Once is enough."""
        for place in () if self._begun else self.all:
            self._in_background(self._fill(place))
        self._begun = True

    def check(self) -> None:
        """Raise what ended all."""
        if self._broken is not None:
            raise self._broken

    @property
    def workers(self) -> list[Worker]:
        """Those that answer now."""
        return [place.worker for place in self.all if place.worker is not None]

    async def counted(self) -> None:
        """Wait until every worker of the count was there."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken or all(p.worker for p in self.all[: self._count]))
        self.check()

    async def free(self, *, patience: float, all_tried: bool = False) -> list[Place]:
        """Takes: nothing. Waits for: any worker, and if `all_tried` for a first start of all. Woken by: every start's
        end. Gives: the places of those that live, the least busy first. Raises TimeoutError after `patience` seconds
        without."""
        until = asyncio.get_running_loop().time() + patience
        async with self._changed:
            while True:
                self.check()
                # Looked up here, behind every wait: a worker may be lost between waking and going on.
                found = [place for place in self.all if place.worker is not None]
                if found and (not all_tried or all(place.tried for place in self.all)):
                    return sorted(found, key=lambda place: (place.load, place.number))
                async with asyncio.timeout_at(until):
                    await self._changed.wait()

    def lose(self, place: Place, worker: Worker, lost: WorkerLost) -> None:
        """Take a worker out once, however many of its callers notice, and start another in its place."""
        if place.worker is not worker or self._broken is not None:
            return
        place.worker = None
        self._say(f"lost {lost}; its {self._work} are asked again")
        self._note(place, lost)
        self._in_background(self._fill(place))

    def give_way(self, among: Container[str] | None = None) -> int | None:
        """End the last worker (of those named) if others are left, so that its room can be used; its place waits for
        room again. Returns the place's number."""
        there = [(place, place.worker) for place in self.all if place.worker is not None]
        going = [(place, worker) for place, worker in there if among is None or worker.name in among]
        if len(there) < 2 or not going:
            return None
        place, worker = going[-1]
        place.worker = None
        worker.kill()
        self._in_background(self._fill(place))
        return place.number

    def close(self, what: str) -> None:
        """Start no others; those that end now are no loss. To be called in the event loop."""
        self._give_up(RuntimeError(f"{what} closed"))
        for task in self._tasks:
            task.cancel()
        self._in_background(self._wake())

    def _note(self, place: Place, lost: WorkerLost) -> None:
        """A lost worker is a failure if it counts."""
        self.lost += 1
        if place.number < self._count:
            try:
                self._failures(lost)
            except RuntimeError as enough:
                self._give_up(enough)
        else:
            self._wait_longer(place)

    def _wait_longer(self, place: Place) -> None:
        """One beyond the count that fails again and again is tried less and less often, until it stays for a while."""
        if asyncio.get_running_loop().time() - place.since > LONGEST_PAUSE:
            place.pause = 0.0
        place.since = math.inf
        place.pause = min(max(1.0, 2 * place.pause), LONGEST_PAUSE)

    def _give_up(self, error: BaseException) -> None:
        """The first reason is the one that is told."""
        self._broken = self._broken or error

    async def _fill(self, place: Place) -> None:
        """Takes: an empty place. Waits for: room, and its worker, as many starts as it takes. Woken by: the runtime.
        Gives: a ready worker."""
        nodes = 0
        while self._broken is None:
            pause = 0.0
            try:
                await asyncio.sleep(place.pause)
                worker = await self._start(place.number)
                if place.tried or place.number >= self._count:
                    self._say(f"{worker.name} is ready")
                place.worker, place.since = worker, asyncio.get_running_loop().time()
                self._in_background(self._watch(place, worker))
                break  # it may be lost before all are told: then another one fills its place
            except NodeLost as lost:
                nodes += 1
                pause = nodes * PAUSE
                if nodes > NODES:
                    self._say(f"lost {lost}")
                    self._note(place, lost)
            except WorkerLost as lost:
                nodes = 0
                self._say(f"lost {lost}")
                self._note(place, lost)
            except Exception as error:  # noqa: BLE001 - whoever waits for a worker is told
                if place.number < self._count:
                    self._give_up(error)
                else:  # all others are well: it may be its node that lacks something
                    self._say(f"a worker that would join did not start: {type(error).__name__}: {reason_of(error)}")
                    self._wait_longer(place)
            await self._tell(place)
            await asyncio.sleep(pause)
        await self._tell(place)

    async def _watch(self, place: Place, worker: Worker) -> None:
        """A loss that no call finds, since none is under way."""
        self.lose(place, worker, await worker.gone())

    async def _tell(self, place: Place) -> None:
        place.tried = True
        await self._wake()

    async def _wake(self) -> None:
        """Whoever waits looks again."""
        async with self._changed:
            self._changed.notify_all()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
