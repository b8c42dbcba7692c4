"""Workers in numbered places; a lost worker's place is filled again.

    open -> start -> a ready worker -> it is lost -> another start, as often as needed
    free -> places of living workers, the least busy first

A call that finds a worker lost reports it (`lose`); without calls the runtime does. Left out: the requests to workers,
except that `asked` repeats one whose worker is lost.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Container, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from plaudit.runtime.worker import NodeLost, NoWorkersError, Result, SenderLost, Worker, WorkerLost, reason_of

Kind = TypeVar("Kind")
Start = Callable[[int], Awaitable[Worker[Kind]]]
"""Start a place's worker and make it ready, however long it waits for room. A place keeps its number when its worker is
replaced. Raises WorkerLost if the worker died while starting, or the error that makes starting impossible."""
PAUSE = 0.2
"""Seconds between two starts of a place whose node is lost, until the runtime has found another; grows each time."""
NODES = 5
"""Number of starts in a row that may lose their node without counting as a failure, since nodes may come and go."""
LONGEST_PAUSE = 60.0
"""Seconds between two starts of a place beyond the count whose workers are lost repeatedly."""


@dataclass(eq=False, slots=True)
class Place(Generic[Kind]):
    number: int
    worker: Worker[Kind] | None = None
    tried: bool = False
    """True after its first start, successful or not."""
    load: int = 0
    """Requests to its worker that are not answered yet."""
    pause: float = 0.0
    """Seconds before the next start."""
    since: float = math.inf
    """When its present worker became ready, by the event loop's clock; inf without a worker."""


class Supervisor(Generic[Kind]):
    """Numbered places for one kind of workers: starts workers, replaces lost ones, and hands out the least busy."""

    def __init__(
        self,
        start: Start[Kind],
        count: int,
        *,
        most: int = 0,
        work: str,
        patience: float,
        none: str,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`count`: places that must be filled. `most` above `count`: further places are filled when there is room;
        their losses are not failures. `failures` is called with every other lost worker; a RuntimeError of it ends all
        requests. `work` names the requests in messages. Without any worker, requests wait `patience` seconds and then
        raise NoWorkersError with the text `none`, which may hold {patience}."""
        self._start, self._count, self._work, self._patience, self._none = start, count, work, patience, none
        self._failures, self._say = failures, say
        self.all = [Place[Kind](number) for number in range(max(count, most))]
        self._loads: list[tuple[int, int]] = []
        self.lost = 0
        self._begun = False
        self._broken: BaseException | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to start workers; further calls do nothing."""
        for place in () if self._begun else self.all:
            self._in_background(self._fill(place))
        self._begun = True

    def check(self) -> None:
        """Raise the error after which no worker is started any more, if there is one."""
        if self._broken is not None:
            raise self._broken

    @property
    def workers(self) -> list[Worker[Kind]]:
        """Living workers, in the order of places."""
        return [place.worker for place in self.all if place.worker is not None]

    async def counted(self) -> None:
        """Wait until the first `count` places all have a worker. Raises the error of `check`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken or all(p.worker for p in self.all[: self._count]))
        self.check()

    async def asked(
        self,
        cost: int,
        ask: Callable[[Worker[Kind]], Awaitable[Result]],
        *,
        first: Place[Kind] | None = None,
    ) -> Result:
        """Return the answer of the least busy worker, or of the place `first`. If the worker is lost, ask the next."""
        while True:
            place, first = first, None
            try:
                return await (self.once(cost, ask) if place is None else self.call(place, cost, ask))
            except SenderLost:  # what the request refers to is lost: no worker could answer it
                raise
            except WorkerLost:
                continue

    async def once(self, cost: int, ask: Callable[[Worker[Kind]], Awaitable[Result]]) -> Result:
        """Return the answer of the least busy worker. Raises WorkerLost if it is lost before it answers."""
        return await self.call(self._least() or (await self.free())[0], cost, ask)

    def _least(self) -> Place[Kind] | None:
        """Return the place with the least load, as `free` orders them, from a heap; None if there is no worker."""
        self.check()
        while self._loads:
            load, number = self._loads[0]
            if self.all[number].worker is not None and self.all[number].load == load:
                return self.all[number]
            heapq.heappop(self._loads)  # an outdated entry
        return None

    def _count_load(self, place: Place[Kind], cost: int) -> None:
        place.load += cost
        if len(self._loads) < 4 * len(self.all) + 64:
            heapq.heappush(self._loads, (place.load, place.number))
        else:
            self._loads = sorted((one.load, one.number) for one in self.all)

    async def free(self, *, all_tried: bool = False) -> list[Place[Kind]]:
        """Takes: nothing. Waits for: any worker, and with `all_tried` for a first start of all. Woken by: the end of
        every start. Gives: the places of living workers, the least busy first. Raises NoWorkersError after `patience`
        seconds without any."""
        until = asyncio.get_running_loop().time() + self._patience
        async with self._changed:
            while True:
                self.check()
                # Looked up after every wait: a worker may be lost between waking up and continuing.
                found = [place for place in self.all if place.worker is not None]
                if found and (not all_tried or all(place.tried for place in self.all)):
                    return sorted(found, key=lambda place: (place.load, place.number))
                try:
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()
                except TimeoutError:
                    raise NoWorkersError(self._none.format(patience=self._patience)) from None

    async def call(self, place: Place[Kind], cost: int, ask: Callable[[Worker[Kind]], Awaitable[Result]]) -> Result:
        """Return the answer of the place's worker; `cost` counts as its load meanwhile. Raises WorkerLost if the worker
        is lost before it answers; the place is then filled again."""
        worker = place.worker
        if worker is None:
            raise WorkerLost(f"worker {place.number}", "it was lost after it was chosen")
        self._count_load(place, cost)
        try:
            return await ask(worker)
        except SenderLost:
            raise
        except WorkerLost as lost:
            self.lose(place, worker, lost)
            raise
        finally:
            self._count_load(place, -cost)

    def lose(self, place: Place[Kind], worker: Worker[Kind], lost: WorkerLost) -> None:
        """Remove a lost worker once, even if several callers report it, and start another in its place."""
        if place.worker is not worker or self._broken is not None:
            return
        place.worker = None
        self._say(f"lost {lost}; its {self._work} are asked again")
        self._note(place, lost)
        self._in_background(self._fill(place))

    def give_way(self, among: Container[str] | None = None) -> int | None:
        """End the last worker (of those in `among`, if given), unless it is the only one, to free its resources; its
        place then waits for resources. Return the place's number, None if no worker was ended."""
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
        """Start no further workers; workers that end now are not losses. Call this in the event loop."""
        self._give_up(RuntimeError(f"{what} closed"))
        for task in self._tasks:
            task.cancel()
        self._in_background(self._wake())

    def _note(self, place: Place[Kind], lost: WorkerLost) -> None:
        """Count a lost worker as a failure if its place is among the first `count`; otherwise delay its next start."""
        self.lost += 1
        if place.number < self._count:
            try:
                self._failures(lost)
            except RuntimeError as enough:
                self._give_up(enough)
        else:
            self._wait_longer(place)

    def _wait_longer(self, place: Place[Kind]) -> None:
        """Double the pause before the next start of a place beyond `count`; reset it once a worker has survived for a
        while."""
        if asyncio.get_running_loop().time() - place.since > LONGEST_PAUSE:
            place.pause = 0.0
        place.since = math.inf
        place.pause = min(max(1.0, 2 * place.pause), LONGEST_PAUSE)

    def _give_up(self, error: BaseException) -> None:
        """Start no more workers and let requests raise `error`; only the first error is kept."""
        self._broken = self._broken or error

    async def _fill(self, place: Place[Kind]) -> None:
        """Takes: an empty place. Waits for: resources and a ready worker, over as many starts as needed. Woken by: the
        end of a start. Gives: a ready worker in the place."""
        nodes = 0
        while self._broken is None:
            pause = 0.0
            try:
                await asyncio.sleep(place.pause)
                worker = await self._start(place.number)
                if place.tried or place.number >= self._count:
                    self._say(f"{worker.name} is ready")
                place.worker, place.since = worker, asyncio.get_running_loop().time()
                self._count_load(place, 0)
                self._in_background(self._watch(place, worker))
                break  # it may be lost before all waiters wake: then another one fills its place
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
            except Exception as error:  # noqa: BLE001 - raised where a worker is waited for
                if place.number < self._count:
                    self._give_up(error)
                else:  # other workers run: the fault may be this node's
                    self._say(f"a worker that would join did not start: {type(error).__name__}: {reason_of(error)}")
                    self._wait_longer(place)
            await self._tell(place)
            await asyncio.sleep(pause)
        await self._tell(place)

    async def _watch(self, place: Place[Kind], worker: Worker[Kind]) -> None:
        """Wait until the worker is lost and report it: without a running call nothing else would."""
        self.lose(place, worker, await worker.gone())

    async def _tell(self, place: Place[Kind]) -> None:
        place.tried = True
        await self._wake()

    async def _wake(self) -> None:
        """Wake all waiters."""
        async with self._changed:
            self._changed.notify_all()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
