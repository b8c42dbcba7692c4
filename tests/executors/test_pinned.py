"""Ranks hold the long answers of a step, and know which of them are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from plaudit.executors.pinned import Pins, pinned
from plaudit.runtime.worker import AnswersLost
from plaudit.types import Completion, Finish, Group, Prompt, Response, Score
from plaudit.types.distant import Distant


class Kept:
    """A source in this process. If the node of one is lost, a fetch of several raises."""

    def __init__(self, number: int, *, lost: bool = False):
        self.number, self.lost = number, lost

    def all(self, sources: Sequence[Kept]) -> list[Any]:
        if any(one.lost for one in sources):
            raise AnswersLost("answers on a node", "its node is gone")
        return [{"tokens": [one.number]} for one in sources]


class Rank:
    """A handle on a rank in this process."""

    def __init__(self) -> None:
        self.rank, self.calls = Pins(), 0

    async def call(self, method: Any, sources: Sequence[Any]) -> Any:
        self.calls += 1
        return method(self.rank, sources)


def group(index: int, source: Kept | None) -> Group:
    tokens: Any = (1, 2) if source is None else Distant("tokens", 0, 2, source)
    completion = Completion(tokens=tokens, logprobs=(-1.0, -1.0), versions=(0, 0), text="", finish=Finish.EOS)
    response = Response(completion=completion, trainable=(True, True), score=Score(value=1.0), reward=1.0)
    return Group(index=index, prompt=Prompt(id="a", text="", tokens=(3,)), responses=(response,))


def test_a_rank_holds_what_is_left_until_the_next_step() -> None:
    rank = Pins()
    assert rank.pin([Kept(7), Kept(8, lost=True), Kept(9)]) == [1]
    assert [one and one["tokens"] for one in rank._pinned] == [[7], None, [9]]
    assert rank.pin([Kept(5)]) == []
    assert [one and one["tokens"] for one in rank._pinned] == [[5]]


def test_each_rank_holds_a_part() -> None:
    """Short answers are in the driver, and are no source of any rank."""
    lost = (2, 5)
    groups = [group(n, None if n in (0, 3) else Kept(n, lost=n in lost)) for n in range(7)]
    ranks: Any = [Rank(), Rank(), Rank()]
    assert asyncio.run(pinned(ranks, groups)) == [2, 5]
    held = [[one and one["tokens"][0] for one in rank.rank._pinned] for rank in ranks]
    assert held == [[1, None], [None, 6], [4]]


def test_short_answers_ask_no_rank() -> None:
    rank: Any = Rank()
    assert asyncio.run(pinned([rank], [group(0, None)])) == [] and rank.calls == 0
