"""A rollout worker: an engine with its own copy of the policy, in its own process.

    driver's pool -> generate, load (packed weights, or an invitation to fetch them) -> engine -> completions, digest

Every method is a coroutine, so that the process keeps decoding while it answers. Weights are taken only if version,
names and digest are as sent. A run that went back to a checkpoint is a new attempt: versions start again, and late
calls of an earlier attempt are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from plaudit.rollout.accepted import Accepted, Ordered
from plaudit.rollout.content import Content
from plaudit.rollout.engine import Engine
from plaudit.runtime.memory import make_room
from plaudit.runtime.plain import dumps, plain
from plaudit.types import Completion, Sampling
from plaudit.types.distant import Columns, apart
from plaudit.weights.changes import completed
from plaudit.weights.collective import Invitation, Receiver
from plaudit.weights.packed import PackedWeights, unpack


class OutOfDateError(RuntimeError):
    """The call belongs to an earlier attempt: the run has gone back to a checkpoint since."""


class RolloutWorker:
    """Makes one engine callable from the driver's pool."""

    def __init__(
        self,
        engine: Engine,
        content: Content | None = None,
        receiver: Receiver | None = None,
        *,
        interrupt: bool = True,
    ):
        """With `interrupt`, running sequences continue with new weights; without it, `load` first lets them end."""
        self.engine, self.content, self.receiver = engine, content or Content(), receiver or Receiver()
        self.interrupt = interrupt
        self.attempt = 0
        self._accepted = Accepted()
        self._held: list[PackedWeights] = []
        """The newest weights in packed form, kept if the next version may be sent as changes to them."""
        self._running: set[asyncio.Task[list[Completion]]] = set()

    async def begin(self, attempt: int) -> None:
        """Cancel all requests, and accept the next weights whatever their version: they are a checkpoint's."""
        self._enter(attempt)
        await asyncio.gather(*self._running, return_exceptions=True)

    @plain
    async def generate(self, attempt: int, prompt_tokens: Sequence[int], plan: Sequence[Sampling]) -> list[Completion]:
        self._enter(attempt)
        task = asyncio.ensure_future(self.engine.generate(prompt_tokens, plan))
        self._running.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            self._running.discard(task)
            task.cancel()
        if task.cancelled():
            raise OutOfDateError(f"attempt {attempt} was cancelled: attempt {self.attempt} is under way")
        return task.result()

    async def generate_apart(
        self, attempt: int, prompt_tokens: Sequence[int], plan: Sequence[Sampling], least: int
    ) -> tuple[Columns | None, bytes]:
        """As `generate`, but return columns that stay on this node (or None), and the rest, pickled for the driver."""
        columns, reply = apart(await self.generate(attempt, prompt_tokens, plan), least)
        return columns, dumps(reply)

    async def load(self, attempt: int, *sent: PackedWeights | Invitation) -> tuple[int, str]:
        """Sample with these packed weights from now on. Return their version and digest.

        Raises WeightsError and leaves the engine unchanged if they are old, another model's, changes to a version that
        it does not have, or damaged in transit. Raises it too if the engine does not hold them afterwards. The first
        weights may also raise ValueError, if their names are not the model's."""
        self._enter(attempt)
        packed_parts: list[PackedWeights] = []
        for one in sent:
            packed_parts += [one] if isinstance(one, PackedWeights) else await self.receiver.receive(one)
        self._enter(attempt)
        packed_parts = completed(self._held, packed_parts)
        weights, packed = unpack(*packed_parts), packed_parts[0]
        self.content.check(packed.beneath)
        if packed.beneath:
            await asyncio.to_thread(self.content.check_model)
            self._enter(attempt)
        self._accepted.check(weights, packed.version, sent=packed.digest)
        if not self.interrupt:
            await self.engine.drain()
            self._enter(attempt)
        self.engine.load(self.content.arrived(weights), packed.version)
        self._accepted.take(weights, packed.version)
        self._held = [one.on_host() for one in packed_parts if one.halves]
        return packed.version, packed.digest

    async def sleep(self, attempt: int) -> None:
        """Free device memory for its other users, also in other processes. No request may come before `wake`."""
        self._enter(attempt)
        self.engine.sleep()
        make_room()

    async def wake(self, attempt: int) -> None:
        self._enter(attempt)
        self.engine.wake()

    def _enter(self, attempt: int) -> None:
        """Raise OutOfDateError for an earlier attempt. On a later one, cancel all requests; accept any version next."""
        if attempt < self.attempt:
            raise OutOfDateError(f"attempt {attempt} is over: attempt {self.attempt} is under way")
        if attempt == self.attempt:
            return
        self.attempt, self._held = attempt, []
        for task in self._running:
            task.cancel()
        for ordered in (self._accepted, self.engine):
            if isinstance(ordered, Ordered):
                ordered.go_back()
