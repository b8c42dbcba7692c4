"""Batches from the policy's own answers.

    feeder: slot -> prompt -> rollout task -> queue     next: queue (in order) -> rows -> Batch     done: slots back

A slot is taken before a prompt starts and comes back when the weights that learned from it were published (or at
once, if its group carries no signal). With (max_lag + 1) * prompts_per_step slots a sample is at most max_lag versions
old; synchronous training is max_lag 0, not another trainer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from plaudit.algorithms.base import Algorithm
from plaudit.batch import Batch
from plaudit.data.cursor import Cursor
from plaudit.loop.progress import Delivery
from plaudit.rollout.rollouter import Groups, rollout_figures
from plaudit.types import Group, Prompt, Row


class RewardFailureError(RuntimeError):
    """So many rewards failed that the rest would bias training."""


class OnlineSource:
    """Keeps slots filled with rollouts and hands out groups in the order in which their prompts were drawn."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        cursor: Cursor,
        rollouter: Groups,
        algorithm: Algorithm,
        *,
        prompts_per_step: int,
        max_lag: int = 0,
        max_redraw: float = 3.0,
        max_failed: float = 0.1,
    ):
        """`max_redraw` bounds the prompts drawn for one step, as a multiple of prompts_per_step, where groups without a
        signal are replaced; `max_failed` is the share of rewards that may fail in a step."""
        self.prompts, self.cursor, self.rollouter, self.algorithm = prompts, cursor, rollouter, algorithm
        self.prompts_per_step, self.max_redraw, self.max_failed = prompts_per_step, max_redraw, max_failed
        self.slots = asyncio.Semaphore((max_lag + 1) * prompts_per_step)
        self.drawn = 0
        """Prompts started."""
        self.consumed = 0
        """Prompts whose groups were delivered or dropped: where a resumed run goes on."""
        self._running: deque[asyncio.Task[Group]] = deque()
        self._started = asyncio.Event()
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
                self._feeder.result()  # raises what ended it: nothing else would start another rollout
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
        first = self.consumed
        kept: list[Group] = []
        replaced: list[Group] = []
        seen: list[Group] = []
        rows: list[Row] = []
        dropped = 0
        expected, most = self.prompts_per_step, int(self.max_redraw * self.prompts_per_step)
        while len(seen) < expected:
            group = await self._oldest()
            seen.append(group)
            mine = self.algorithm.rows(group)
            dropped += not mine
            if mine or expected >= most:
                kept.append(group)
                rows.extend(mine)
            else:  # its slot goes to a further prompt, which this step waits for: nothing it started is left running
                expected += 1
                replaced.append(group)
                self.slots.release()
        stats = rollout_figures(seen) | {"groups/dropped": float(dropped), "empty": float(not rows)}
        self._check_failures(seen, stats["reward/failed"])
        batch = Batch.of(rows, unit=self.algorithm.unit) if rows else None
        length = self.cursor.length
        epoch, done = first // length + 1, self.consumed // length
        groups, others = tuple(kept), tuple(replaced)
        return Delivery(batch=batch, epoch=epoch, epochs_done=done, stats=stats, groups=groups, dropped=others)

    def _check_failures(self, groups: Sequence[Group], share: float) -> None:
        if share <= self.max_failed:
            return
        reasons = {r.score.reason for group in groups for r in group.responses if r.score.value is None}
        raise RewardFailureError(
            f"{share:.0%} of the rewards of this step failed, {self.max_failed:.0%} are allowed "
            f"(rollout.max_failed). Reasons: {sorted(map(str, reasons))[:3]}"
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
        """Cancel what still runs. What was not consumed is drawn again by a resumed run."""
        tasks = [*self._running, *([self._feeder] if self._feeder is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
