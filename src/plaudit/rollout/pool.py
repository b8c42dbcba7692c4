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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plaudit.rollout.accepted import WeightsError
from plaudit.runtime.places import Place, Places, Start
from plaudit.runtime.worker import NoWorkersError, SenderLost, Worker, WorkerLost
from plaudit.types import Completion, Sampling
from plaudit.weights.transport import Shipment

if TYPE_CHECKING:
    from torch import Tensor


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
        self._start, self._patience = start, patience
        self.places = Places(self._ready, count, most=most, work="prompts", failures=failures, say=say)
        self._open = 0
        self._shipment: Shipment | None = None
        self._resting = False
        self._joining = 0
        self.attempt = 0
        self.version = 0

    async def open(self) -> None:
        """Start `count` workers; those beyond come when there is room."""
        self.places.open()
        await self.places.counted()

    @property
    def workers(self) -> list[Worker]:
        """Those that answer now."""
        return self.places.workers

    @property
    def busy(self) -> bool:
        return self._open > 0

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
                    self.places.lose(place, worker, lost)
                else:
                    return answer
                finally:
                    place.load -= cost
        finally:
            self._open -= 1

    async def _least_busy(self) -> Place:
        try:
            return (await self.places.free(patience=self._patience))[0]
        except TimeoutError:
            raise NoWorkersError(
                f"no rollout worker became ready within {self._patience:g} s, twice runtime.start_timeout"
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
        there = {place.worker: place for place in self.places.all if place.worker is not None}
        for worker, lost in (await self._delivered(shipment, *there)).items():
            self.places.lose(there[worker], worker, lost)
        self.places.check()

    async def rest(self) -> None:
        """Have workers sleep, and those that become ready meanwhile; those that are `joining` are waited for, as long
        as anybody waits for a worker. Nobody may ask before `rise`."""
        self._resting = True
        await self._each("sleep", self.attempt)
        until = asyncio.get_running_loop().time() + self._patience
        while self._joining and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)

    async def rise(self) -> None:
        self._resting = False
        await self._each("wake", self.attempt)

    async def _each(self, method: str, *arguments: Any) -> None:
        async def one(place: Place, worker: Worker) -> None:
            try:
                await worker.call(method, *arguments)
            except WorkerLost as lost:
                self.places.lose(place, worker, lost)

        await asyncio.gather(*(one(place, place.worker) for place in self.places.all if place.worker is not None))
        self.places.check()

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

    # --- those that join

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within it a worker takes memory of its devices: from its start, for whoever starts it to say, until it has
        the newest weights."""
        self._joining += 1
        try:
            yield
        finally:
            self._joining -= 1

    async def _ready(self, number: int) -> Worker:
        """A new worker, with the newest weights."""
        worker = await self._start(number)
        try:
            with self.joining():  # nothing runs between its start and here
                await self._brought_up(worker)
        except Exception:
            worker.kill()
            raise
        return worker

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

    async def drain(self) -> None:
        """Each worker does so itself when weights come."""

    def load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        raise NotImplementedError("a pool's weights come by publish()")

    def sleep(self) -> None:
        raise NotImplementedError("a pool's workers sleep by rest()")

    def wake(self) -> None:
        raise NotImplementedError("a pool's workers wake by rise()")

    def close(self) -> None:
        self.places.close("the pool was")
