"""Copy distant answers to ranks' nodes before a step learns from them.

groups of a step -> their sources -> each is fetched and held by a rank -> the groups whose answers are lost

Afterwards the step does not need the nodes that sampled these answers. Judges hold answers in the same way while they
score. Left out: drawing lost groups again (`loop/redraw.py`).
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


class Pins:
    """The method by which a rank or a judge fetches answers of other nodes and holds them."""

    _pinned: Sequence[Columns | None] = ()

    def pin(self, sources: Sequence[Source]) -> list[int]:
        """Fetch the columns of these sources and hold them until the next call, so that this node's object store keeps
        them. Return the indices of lost sources in the list."""
        self._pinned = ()
        try:
            self._pinned = sources[0].all(sources) if sources else ()
        except AnswersLost:
            self._pinned = [_fetched(source) for source in sources]
        return [number for number, columns in enumerate(self._pinned) if columns is None]


def _fetched(source: Source) -> Columns | None:
    try:
        return source.all([source])[0]
    except AnswersLost:
        return None


async def pinned(ranks: Sequence[RayWorker[Pins]], groups: Sequence[Group]) -> list[int]:
    """Let each rank hold some of the groups' answers. Return the indices of groups whose answers are lost."""
    found = [(number, source) for number, group in enumerate(groups) if (source := _source(group)) is not None]
    if not found:
        return []
    dealt = [found[first :: len(ranks)] for first in range(len(ranks))]
    asked = zip(ranks, dealt, strict=True)
    lost = await together(rank.call(Pins.pin, [source for _, source in part]) for rank, part in asked)
    return sorted(part[which][0] for part, own in zip(dealt, lost, strict=True) for which in own)


def _source(group: Group) -> Source | None:
    """Return where a group's distant answers are; None if the driver has them."""
    tokens = (response.tokens for response in group.responses)
    return next((one.source for one in tokens if isinstance(one, Distant)), None)
