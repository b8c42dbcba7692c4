"""The KV caches of finished turns, which wait for their episodes' next turns.

    a turn ends -> put -> the next turn of its episode -> take, back into a row of the table

A number of them are kept; the oldest is dropped first. A dropped one is computed again, with the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from plaudit.rollout.queued import Draft


class Turn(NamedTuple):
    """A finished turn: its episode's tokens before the last, which no step has read, and their keys and values."""

    first: int
    """Number of tokens that were computed in one pass."""
    tokens: list[int]
    parts: list[Tensor]


class Kept:
    """Finished turns by their episodes; of each episode, the newest."""

    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}

    def put(self, draft: Draft, parts: list[Tensor], most: int) -> None:
        """Keep the turn of a draft that has ended; drop the oldest if there are more than `most`."""
        episode = draft.sampling.episode
        assert episode is not None, "only turns of episodes are kept"
        self.turns.pop(episode, None)
        self.turns[episode] = Turn(len(draft.prompt), [*draft.prompt, *draft.further, *draft.tokens[:-1]], parts)
        while len(self.turns) > most:
            del self.turns[next(iter(self.turns))]

    def fits(self, draft: Draft) -> bool:
        """True if the draft goes on from a turn that is kept; its `further` tokens are then read from there on."""
        if draft.sampling.episode is None or (turn := self.turns.get(draft.sampling.episode)) is None:
            return False
        whole, count = draft.prompt + draft.further, len(turn.tokens)
        return turn.first == len(draft.prompt) and count < len(whole) and turn.tokens == whole[:count]

    def take(self, draft: Draft) -> Turn:
        assert draft.sampling.episode is not None, "only turns of episodes are kept"
        return self.turns.pop(draft.sampling.episode)
