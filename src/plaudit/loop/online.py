"""Batches from the policy's own answers.

    slot, Prompt -> feeder -> rollout task -> queue -> next (in order) -> Group, rows -> Delivery -> done -> slots

A slot is taken before a prompt starts. It is returned when the weights that learned from it are published, or at once
if its group carries no signal. With (max_lag + 1) * prompts_per_step slots, a sample is at most max_lag versions old.
Synchronous training is the same loop with max_lag=0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from plaudit.algorithms.base import Algorithm
from plaudit.data.cursor import Cursor
from plaudit.loop.outage import failed
from plaudit.loop.progress import Delivery, batch_of
from plaudit.rollout.figures import rollout_figures
from plaudit.rollout.rollouter import Groups
from plaudit.types import Group, Prompt, Row

MAX_REDRAW = 3.0
"""Most prompts drawn for a step, as a multiple of prompts_per_step. Then groups without a signal are not replaced."""


class OnlineSource:
    """Keep slots filled with rollouts and deliver groups in the order of their prompts."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        cursor: Cursor,
        rollouter: Groups,
        algorithm: Algorithm,
        *,
        prompts_per_step: int,
        max_lag: int = 0,
        repair: Callable[[Sequence[Group]], Awaitable[Sequence[Group]]] | None = None,
    ):
        """`repair` waits for the groups' rewards if too many failed, and may raise (`outage.py`)."""
        self.prompts, self.cursor, self.rollouter, self.algorithm = prompts, cursor, rollouter, algorithm
        self.prompts_per_step, self.repair = prompts_per_step, repair
        self.slots = asyncio.Semaphore((max_lag + 1) * prompts_per_step)
        self.drawn = 0
        """Number of prompts whose rollouts were started."""
        self.consumed = 0
        """Number of prompts whose groups were delivered or dropped: a resumed run continues here."""
        self._running, self._started = deque[asyncio.Task[Group]](), asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None

    async def _feed(self) -> None:
        """Takes: a slot and the next prompt. Waits for: a free slot. Woken by: `done`. Gives: a running rollout."""
        while True:
            await self.slots.acquire()
            index, self.drawn = self.drawn, self.drawn + 1
            prompt = self.prompts[self.cursor.item(index)]
            self._running.append(asyncio.create_task(self.rollouter.rollout(index, prompt)))
            self._started.set()

    async def _oldest(self) -> Group:
        assert self._feeder is not None
        while not self._running:
            if self._feeder.done():
                self._feeder.result()  # raises the feeder's error: nothing else would start another rollout
            self._started.clear()
            await self._started.wait()
        group = await self._running[0]
        self._running.popleft()
        self.consumed += 1
        return group

    async def next(self) -> Delivery:
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
            self._feeder.add_done_callback(lambda feeder: self._started.set())
        first, waited = self.consumed, 0.0
        groups: list[Group] = []
        made, keep = list[list[Row]](), list[bool]()
        expected, most = self.prompts_per_step, int(MAX_REDRAW * self.prompts_per_step)
        while len(groups) < expected:
            groups.append(await self._oldest())
            if len(groups) == expected and self.repair is not None:
                began = time.monotonic()
                old, groups = groups, list(await self.repair(groups))
                for number in (n for n, stays in enumerate(keep) if stays and groups[n] is not old[n]):
                    made[number] = self.algorithm.rows(groups[number])
                waited += time.monotonic() - began
            # Whether a group with failed rewards carries a signal is known only after the repair.
            while len(keep) < len(groups) and (len(groups) == expected or not failed([groups[len(keep)]])):
                made.append(self.algorithm.rows(groups[len(keep)]))
                keep.append(bool(made[-1]) or expected >= most)
                if not keep[-1]:  # this step waits for one more prompt instead, which takes the slot
                    expected += 1
                    self.slots.release()
        trained = tuple(group for group, whether in zip(groups, keep, strict=True) if whether)
        replaced = tuple(group for group, whether in zip(groups, keep, strict=True) if not whether)
        batch = batch_of([row for part in made for row in part], self.algorithm.unit)
        stats = {"groups/dropped": float(made.count([])), "empty": float(batch is None), "time/outage": waited}
        return Delivery(
            batch=batch,
            epoch=first // self.cursor.length + 1,
            epochs_done=self.consumed / self.cursor.length,
            stats=rollout_figures(groups) | stats,
            groups=trained,
            dropped=replaced,
        )

    async def done(self, delivery: Delivery) -> None:
        for _ in delivery.groups:
            self.slots.release()

    def state(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def restore(self, state: dict[str, Any]) -> None:
        assert self._feeder is None, "restore before the first step"
        self.consumed = self.drawn = int(state["consumed"])

    async def close(self) -> None:
        """Cancel running rollouts. A resumed run samples again for the prompts that were not consumed."""
        tasks = [*self._running, *filter(None, [self._feeder])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
