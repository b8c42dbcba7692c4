"""Many rollout workers as one engine, which survives the loss of some and uses others that join.

    generate -> the least busy worker -> completion; if it is lost, its requests go to others and a new one starts
    a later turn of an episode -> the worker that sampled the turn before
    publish(shipment) -> load on every worker -> version and digest confirmed; a worker that does not is replaced
    sleep, wake -> workers free memory for those that share their devices, and take it back
    begin(attempt) -> earlier requests are dropped on all workers, and new weights are awaited

A sample depends only on seed, prompt and weights, so any worker may answer a request again. A new worker answers only
after it has confirmed the newest weights. Every call carries the attempt: workers refuse calls from before the run went
back to a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from plaudit.rollout.worker import RolloutWorker
from plaudit.runtime.plain import loads
from plaudit.runtime.supervisor import Place, Start, Supervisor
from plaudit.runtime.worker import Doing, SenderLost, Worker, WorkerLost
from plaudit.types import Completion, Sampling
from plaudit.types.distant import BYTES, arrived
from plaudit.weights.pieces import WeightsError
from plaudit.weights.transport import Shipment

MOST_EPISODES = 1 << 16
"""Episodes of which the pool knows who sampled their last turns, the newest ones."""


class WeightsRefused(WorkerLost):
    """A worker that was ended: it refused the weights, or reported another version or digest than was sent."""


class Pool:
    """A `Sampler` that spreads requests over rollout workers; `publish` gives them weights."""

    def __init__(
        self,
        start: Start[RolloutWorker],
        count: int,
        *,
        most: int = 0,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
        stay: int | None = None,
    ):
        """Workers beyond `count`, up to `most`, start when nodes have free resources; their loss is no failure. If no
        worker is left, requests wait at most `patience` seconds. `failures` is called for any other lost worker and may
        raise, which ends the run. Tokens, log-probs and versions of a prompt's answers stay on the node that sampled
        them if they take at least `stay` bytes (`types/distant.py`); None sends all to the driver."""
        self._start, self._patience, self._stay = start, patience, stay
        none = "no rollout worker became ready within {patience:g} s, twice runtime.start_timeout"
        self.supervisor = Supervisor(
            self._ready,
            count,
            most=most,
            work="prompts",
            patience=patience,
            none=none,
            failures=failures,
            say=say,
        )
        self.doing: Doing = lambda *_, **__: nullcontext()
        """Entered while a worker samples, to record it."""
        self._open = 0
        self._turns: dict[int, Worker[RolloutWorker]] = {}
        self._shipment: Shipment | None = None
        self.awake = asyncio.Event()
        """Cleared by `sleep`, set by `wake`."""
        self.awake.set()
        self._joining = 0
        self.attempt = 0
        self.version = 0

    async def open(self) -> None:
        """Start workers and wait until `count` have become ready; more join when nodes have room."""
        self.supervisor.open()
        await self.supervisor.counted()

    @property
    def workers(self) -> list[Worker[RolloutWorker]]:
        """The workers that answer now."""
        return self.supervisor.workers

    @property
    def busy(self) -> bool:
        return self._open > 0

    # --- requests

    async def generate(self, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        cost = sum(sampling.max_tokens for sampling in plan)
        episode = plan[0].episode if plan else None
        self._open += 1

        async def ask(worker: Worker[RolloutWorker]) -> list[Completion]:
            self._remember(episode, worker)
            asked = self.attempt, list(prompt_tokens), list(plan)
            with self.doing(worker.name, "samples", turn=episode is not None):
                if self._stay is None or BYTES * cost < self._stay:
                    return await worker.call(RolloutWorker.generate, *asked)
                source, reply = await worker.call_apart(RolloutWorker.generate_apart, *asked, self._stay)
                return arrived(loads(reply), source)

        try:
            return await self.supervisor.asked(cost, ask, first=self._place(episode))
        finally:
            self._open -= 1

    def _remember(self, episode: int | None, worker: Worker[RolloutWorker]) -> None:
        if episode is not None:
            self._turns.pop(episode, None)
            self._turns[episode] = worker
            if len(self._turns) > MOST_EPISODES:
                del self._turns[next(iter(self._turns))]

    def _place(self, episode: int | None) -> Place[RolloutWorker] | None:
        """Return the place of the worker that sampled the last turn of an episode, and may have kept its cache."""
        worker = None if episode is None else self._turns.get(episode)
        return next((place for place in self.supervisor.all if worker and place.worker is worker), None)

    # --- weights

    async def begin(self, attempt: int) -> None:
        """Cancel all requests: the run goes back to a checkpoint, and workers wait for its weights."""
        self.attempt, self._shipment = attempt, None
        await self._each(RolloutWorker.begin)

    async def publish(self, shipment: Shipment) -> bool:
        """Deliver the weights to every worker; replace workers that are lost or do not confirm version and digest.
        Return True if one did not confirm: the shipment may be damaged. Raises SenderLost if the weights are lost."""
        self._shipment, self.version = shipment, shipment.version
        there = {place.worker: place for place in self.supervisor.all if place.worker is not None}
        found = await self._delivered(shipment, *there)
        for worker, lost in found.items():
            self.supervisor.lose(there[worker], worker, lost)
        self.supervisor.check()
        return any(isinstance(lost, WeightsRefused) for lost in found.values())

    async def sleep(self) -> None:
        """Put all workers to sleep, also those that become ready before `wake`. Wait at most `patience` seconds for
        workers that are `joining`. No request may come before `wake`."""
        self.awake.clear()
        await self._each(RolloutWorker.sleep)
        until = asyncio.get_running_loop().time() + self._patience
        while self._joining and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)

    async def wake(self) -> None:
        self.awake.set()
        await self._each(RolloutWorker.wake)

    async def _each(self, method: Callable[[RolloutWorker, int], Coroutine[Any, Any, None]]) -> None:
        attempt = self.attempt

        async def all_of(worker: Worker[RolloutWorker]) -> None:
            await asyncio.gather(*(process.call(method, attempt) for process in worker.processes))

        async def one(place: Place[RolloutWorker]) -> None:
            with suppress(WorkerLost):
                await self.supervisor.call(place, 0, all_of)

        await asyncio.gather(*(one(place) for place in self.supervisor.all if place.worker is not None))
        self.supervisor.check()

    async def _delivered(
        self, shipment: Shipment | None, *workers: Worker[RolloutWorker]
    ) -> dict[Worker[RolloutWorker], WorkerLost]:
        """Deliver the weights, and end workers that do not confirm them. Return each lost or ended worker with the
        reason; all others hold the weights. Return {} without a shipment."""
        if shipment is None:
            return {}
        pairs = [(worker, process) for worker in workers for process in worker.processes]
        outcomes = await shipment.deliver([process for _, process in pairs], self.attempt)
        sent = shipment.version, shipment.digest
        lost: dict[Worker[RolloutWorker], WorkerLost] = {}
        for (worker, _), outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, WorkerLost):
                lost[worker] = outcome
            elif outcome != sent and worker not in lost:
                said = outcome if isinstance(outcome, WeightsError) else f"it confirmed {outcome}, {sent} were sent"
                lost[worker] = WeightsRefused(worker.name, f"does not hold the newest weights: {said}")
                worker.kill(lost[worker].reason)
        return lost

    # --- those that join

    @contextmanager
    def joining(self) -> Iterator[None]:
        """While active, count a worker that takes device memory, so that `sleep` waits for it. The starter enters this
        for the start itself, `_ready` until the worker has the newest weights."""
        self._joining += 1
        try:
            yield
        finally:
            self._joining -= 1

    async def _ready(self, number: int) -> Worker[RolloutWorker]:
        """Start a worker and give it the newest weights."""
        worker = await self._start(number)
        try:
            with self.joining():  # no other task runs between the worker's start and this line
                await self._brought_up(worker)
        except Exception:
            worker.kill()
            raise
        return worker

    async def _brought_up(self, worker: Worker[RolloutWorker]) -> None:
        """Give the worker the newest weights, and put it to sleep if the pool sleeps; repeat if either has changed."""
        while True:
            shipment, awake = self._shipment, self.awake.is_set()
            try:
                for lost in (await self._delivered(shipment, worker)).values():
                    raise lost
            except SenderLost:  # `publish` gets the same error, and sends other weights
                if shipment is self._shipment:
                    await asyncio.sleep(0.2)
                continue
            if not awake:
                await worker.call(RolloutWorker.sleep, self.attempt)
            if shipment is self._shipment and awake is self.awake.is_set():
                return
            if not awake:
                await worker.call(RolloutWorker.wake, self.attempt)

    def close(self) -> None:
        self.supervisor.close("the pool was")
