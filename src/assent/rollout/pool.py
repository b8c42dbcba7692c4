"""Many rollout workers as one engine, which goes on when some of them are lost and uses those that join.

    generate -> the least busy worker -> completion; if it is lost, its requests go to others and a new one starts
    publish(shipment) -> load on every worker -> version and digest confirmed
    rest, rise -> workers give their memory up to who shares their devices, and take it back
    begin(attempt) -> what was asked before is dropped, here and there; weights come anew

What is drawn depends on seed, prompt and weights alone, so a request may be asked again of any worker. A new worker
answers only after it confirmed the newest weights. Every call carries the attempt: workers refuse what is left over
from before the run went back to a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assent.rollout.accepted import WeightsError
from assent.runtime.worker import NodeLost, NoWorkersError, SenderLost, Worker, WorkerLost
from assent.types import Completion, Sampling
from assent.weights.transport import Shipment

if TYPE_CHECKING:
    from torch import Tensor

Start = Callable[[int], Awaitable[Worker]]
"""Starts the worker of a place in the pool, however long it waits for room; a place keeps its number when its worker is
replaced."""
LONGEST_PAUSE = 60.0
"""Seconds between two starts of a place whose workers are lost again and again."""


@dataclass(eq=False, slots=True)
class _Place:
    number: int
    worker: Worker | None = None
    load: int = 0
    """Tokens it was asked for and has not answered."""
    pause: float = 0.0
    """Seconds before the next start."""


class Pool:
    """An `Engine` for whoever asks; weights come by `publish`, not by `load`."""

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        most: int = 0,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`most` above `count`: the places beyond are filled when there is room and are no failure when lost. Without
        any worker, requests wait `patience` seconds. `failures` is told of every other lost worker and may raise, which
        ends the run."""
        self._start, self._failures, self._say = start, failures, say
        self._count, self._patience = count, patience
        self._places = [_Place(number) for number in range(max(count, most))]
        self._open = 0
        self._shipment: Shipment | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._broken: BaseException | None = None
        self._resting = False
        self.attempt = 0
        self.version = 0
        self.lost = 0

    async def open(self) -> None:
        """Start `count` workers; those beyond come when there is room."""
        for place in self._places[self._count :]:
            self._in_background(self._join(place))
        await asyncio.gather(*(self._fill(place) for place in self._places[: self._count]))
        self._check()

    @property
    def workers(self) -> list[Worker]:
        """Those that answer now."""
        return [place.worker for place in self._places if place.worker is not None]

    @property
    def busy(self) -> bool:
        return self._open > 0

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    # --- requests

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
                    answer: list[Completion] = await worker.call(
                        "generate", self.attempt, list(prompt_tokens), list(plan)
                    )
                except WorkerLost as lost:
                    self._lose(place, worker, lost)
                else:
                    return answer
                finally:
                    place.load -= cost
        finally:
            self._open -= 1

    async def _least_busy(self) -> _Place:
        """Takes: nothing. Waits for: some worker. Woken by: one that becomes ready, or the end. Gives: its place."""
        until = asyncio.get_running_loop().time() + self._patience
        async with self._changed:
            while True:
                self._check()
                # Looked up here, behind every wait: a worker may be lost between waking and going on.
                found = [place for place in self._places if place.worker is not None]
                if found:
                    return min(found, key=lambda place: (place.load, place.number))
                try:
                    await asyncio.wait_for(self._changed.wait(), until - asyncio.get_running_loop().time())
                except TimeoutError:
                    raise NoWorkersError(
                        f"no rollout worker became ready within {self._patience:g} s (runtime.start_timeout)"
                    ) from None

    # --- weights

    async def begin(self, attempt: int) -> None:
        """The run goes back to a checkpoint: workers stop what they do and wait for its weights."""
        self.attempt, self._shipment = attempt, None
        await self._each("begin", attempt)

    async def publish(self, shipment: Shipment) -> None:
        """Have every worker take the weights and confirm them; a lost one is replaced. Raises SenderLost where they are
        gone."""
        self._shipment, self.version = shipment, shipment.version
        there = {place.worker: place for place in self._places if place.worker is not None}
        for worker, lost in (await self._delivered(shipment, *there)).items():
            self._lose(there[worker], worker, lost)
        self._check()

    async def rest(self) -> None:
        """Have workers sleep, and those that become ready meanwhile. Nobody may ask before `rise`."""
        self._resting = True
        await self._each("sleep", self.attempt)

    async def rise(self) -> None:
        self._resting = False
        await self._each("wake", self.attempt)

    async def _each(self, method: str, *arguments: Any) -> None:
        async def one(place: _Place, worker: Worker) -> None:
            try:
                await worker.call(method, *arguments)
            except WorkerLost as lost:
                self._lose(place, worker, lost)

        await asyncio.gather(*(one(place, place.worker) for place in self._places if place.worker is not None))
        self._check()

    async def _delivered(self, shipment: Shipment | None, *workers: Worker) -> dict[Worker, WorkerLost]:
        """Those that were lost on the way; the others have the weights, if there are any yet."""
        if shipment is None:
            return {}
        found = dict(zip(workers, await shipment.deliver(workers, self.attempt), strict=True))
        sent = shipment.version, shipment.digest
        for worker, outcome in found.items():
            if not isinstance(outcome, WorkerLost) and outcome != sent:
                raise WeightsError(f"{worker.name} confirmed weights {outcome}, but {sent} were sent.")
        return {worker: outcome for worker, outcome in found.items() if isinstance(outcome, WorkerLost)}

    # --- places

    def _lose(self, place: _Place, worker: Worker, lost: WorkerLost) -> None:
        """Take a worker out once, however many of its callers notice, and start another in its place."""
        if place.worker is not worker:
            return
        place.worker = None
        self._say(f"lost {lost}; its prompts are asked again")
        self._note(place, lost)
        self._in_background(self._join(place))

    def _note(self, place: _Place, lost: WorkerLost) -> None:
        """A lost worker is a failure if the run counts on it; one that fails again and again is waited for longer."""
        self.lost += 1
        if place.number < self._count:
            try:
                self._failures(lost)
            except RuntimeError as enough:
                self._broken = enough
        else:
            place.pause = min(max(1.0, 2 * place.pause), LONGEST_PAUSE)

    async def _join(self, place: _Place) -> None:
        """Takes: an empty place. Waits for: room, and its worker. Woken by: the runtime. Gives: a ready worker."""
        try:
            await asyncio.sleep(place.pause)
            await self._fill(place)
            if place.worker is not None:
                self._say(f"{place.worker.name} is ready")
        except Exception as error:  # noqa: BLE001 - whoever waits for a worker is told
            self._broken = error
            await self._tell()

    async def _fill(self, place: _Place) -> None:
        """A worker with the newest weights, as many starts as it takes."""
        while self._broken is None:
            try:
                worker = await self._start(place.number)
                await self._brought_up(worker)
            except NodeLost:
                continue
            except WorkerLost as lost:
                self._say(f"lost {lost}")
                self._note(place, lost)
                await asyncio.sleep(place.pause)
                continue
            place.worker = worker
            break
        await self._tell()

    async def _brought_up(self, worker: Worker) -> None:
        """Weights may be published while it takes the last ones, and the others may go to sleep."""
        while True:
            shipment, resting = self._shipment, self._resting
            try:
                for lost in (await self._delivered(shipment, worker)).values():
                    raise lost
            except SenderLost:  # whoever publishes finds out, and sends others
                if shipment is self._shipment:
                    await asyncio.sleep(0.2)
                continue
            if resting:
                await worker.call("sleep", self.attempt)
            if shipment is self._shipment and resting is self._resting:
                return
            if resting:
                await worker.call("wake", self.attempt)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_way(self, among: Container[str] | None = None) -> int | None:
        """End the last worker (of those named) if others are left, so that its room can be used; its place waits for
        room again. Returns the place's number."""
        there = [(place, place.worker) for place in self._places if place.worker is not None]
        going = [(place, worker) for place, worker in there if among is None or worker.name in among]
        if len(there) < 2 or not going:
            return None
        place, worker = going[-1]
        place.worker = None
        worker.kill()
        self._in_background(self._join(place))
        return place.number

    async def drain(self) -> None:
        """Each worker does so itself when weights come."""

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        raise NotImplementedError("a pool's weights come by publish()")

    def sleep(self) -> None:
        raise NotImplementedError("a pool's workers sleep by rest()")

    def wake(self) -> None:
        raise NotImplementedError("a pool's workers wake by rise()")

    def close(self) -> None:
        self._broken = self._broken or RuntimeError("the pool was closed")
        for task in self._tasks:
            task.cancel()
