"""Draw answers again if they are lost with the node that sampled them.

lost before they are scored -> drawn again -> group
groups of a step -> those whose answers ranks cannot fetch -> drawn again -> rows, Batch

Without lag the same weights draw the same answers. Left out: how lost answers are found (`executors/pinned.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from plaudit.loop.online import OnlineSource
from plaudit.loop.progress import Delivery, batch_of
from plaudit.rollout.figures import rollout_figures
from plaudit.rollout.rollouter import Rollouter
from plaudit.runtime.coroutines import together
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Group, Prompt

TRIES = 3
"""After this many losses of the same answers in a row, the run goes back to a checkpoint."""
Lost = Callable[[Sequence[Group]], Awaitable[Sequence[int]]]
"""Pins groups' answers for the step that learns from them; returns the indices of groups whose answers are lost."""


class LastingRollouter(Rollouter):
    """A `Rollouter` that samples again if answers are lost before they are scored. Raises AnswersLost after TRIES."""

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        for _ in range(TRIES - 1):
            with suppress(AnswersLost):
                return await super().rollout(index, prompt)
        return await super().rollout(index, prompt)

    async def again(self, group: Group, lasting: bool) -> Group:
        """As `Rollouter.again` (score failed answers again); if the answers are lost, return a newly drawn group."""
        try:
            return await super().again(group, lasting)
        except AnswersLost:
            return await self.rollout(group.index, group.prompt)


class LastingSource(OnlineSource):
    """An `OnlineSource` whose delivered answers survive the loss of the nodes that sampled them."""

    def __init__(self, *arguments: Any, lost: Lost, say: Callable[[str], None], **more: Any):
        super().__init__(*arguments, **more)
        self.lost, self.say = lost, say

    async def next(self) -> Delivery:
        """Draw lost answers of the delivery again. Raises AnswersLost if some were lost TRIES times in a row."""
        delivery = await super().next()
        groups = await self._redrawn(delivery)
        if all(one is other for one, other in zip(groups, delivery.groups, strict=True)):
            return delivery
        batch = batch_of([row for group in groups for row in self.algorithm.rows(group)], self.algorithm.unit)
        stats = delivery.stats | rollout_figures([*groups, *delivery.dropped]) | {"empty": float(batch is None)}
        return replace(delivery, batch=batch, groups=tuple(groups), stats=stats)

    async def _redrawn(self, delivery: Delivery) -> list[Group]:
        """Return the delivery's groups after drawing lost ones again, until none is lost. Answers of dropped groups are
        pinned too, for hooks, but are not drawn again."""
        groups, count = [*delivery.groups, *delivery.dropped], len(delivery.groups)
        for losses in itertools.count(1):
            if not (gone := [number for number in await self.lost(groups) if number < count]):
                break
            if losses == TRIES:
                raise AnswersLost("answers on a node", f"were lost {TRIES} times, one behind the other")
            self.say(f"lost the answers to {len(gone)} of {count} prompts with a node; they are drawn again")
            new = await together(self._drawn(groups[number]) for number in gone)
            for number, group in zip(gone, new, strict=True):
                groups[number] = group
            if self.repair is not None:
                groups = list(await self.repair(groups))
        return groups[:count]

    async def _drawn(self, group: Group) -> Group:
        return await self.rollouter.rollout(group.index, group.prompt)
