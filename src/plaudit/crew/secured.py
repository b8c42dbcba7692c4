"""Answers that stayed where they were sampled get a copy on the nodes of ranks, before a step learns from them.

groups of a step -> their sources -> a rank of each node fetches and holds them -> the groups whose answers are lost

From then on the step does not need the nodes that sampled them. Left out: lost groups, which are drawn again
(`loop/redraw.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plaudit.runtime.coroutines import together
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Group
from plaudit.types.distant import Columns, Distant, Source

if TYPE_CHECKING:
    from plaudit.runtime.ray_worker import RayWorker


class Secures:
    """A rank, as far as answers of other nodes go."""

    _secured: Sequence[Columns | None] = ()

    def secure(self, sources: Sequence[Source]) -> list[int]:
        """Fetch the columns of some sources, and hold them until the next call: while a process of a node uses them,
        its store keeps them. Return the numbers of those that are lost."""
        self._secured = ()
        try:
            self._secured = sources[0].all(sources) if sources else ()
        except AnswersLost:
            self._secured = [_fetched(source) for source in sources]
        return [number for number, columns in enumerate(self._secured) if columns is None]


def _fetched(source: Source) -> Columns | None:
    try:
        return source.all([source])[0]
    except AnswersLost:
        return None


async def secured(ranks: Sequence[RayWorker[Secures]], groups: Sequence[Group]) -> list[int]:
    """Let these ranks hold the groups' answers. Return the numbers of the groups whose answers are lost."""
    found = [(number, source) for number, group in enumerate(groups) if (source := _source(group)) is not None]
    sources = [source for _, source in found]
    if not found:
        return []
    lost = await together(rank.call(Secures.secure, sources) for rank in ranks)
    return sorted({found[which][0] for own in lost for which in own})


def _source(group: Group) -> Source | None:
    """Where a group's answers are; None if they are here."""
    tokens = (response.tokens for response in group.responses)
    return next((one.source for one in tokens if isinstance(one, Distant)), None)
