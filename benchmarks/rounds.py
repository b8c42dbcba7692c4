"""Which kills there are, and in which runs: every role in every phase, before any comes again.

kills in all, seed -> planned -> rounds, each a run's -> kills.py
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from dataclasses import dataclass

from faults import PHASES, WORKERS, Kill, dealt


def named(method: str, kills: list[Kill]) -> list[Kill]:
    for kill in kills:
        kill.method = method
    return kills


@dataclass(frozen=True)
class Round:
    """A run, or one that goes on again and again, and the kills that it goes through."""

    kind: str
    number: int
    kills: list[Kill]


@dataclass(frozen=True)
class Kind:
    """Of rounds."""

    method: str
    count: int
    """Kills of a round."""
    seconds: float
    """That a kill takes, about: on two cores, with the start of its run and the undisturbed one."""
    roles: tuple[str, ...] = tuple(WORKERS)
    phases: tuple[str, ...] = PHASES
    cold: int | None = None
    """As in `dealt`: where freezes begin, None for kills only."""
    apart: int = 1
    later: int = 0
    """Steps before the first kill, beyond one."""

    def deal(self, seed: int, count: int, *, first: int) -> list[Kill]:
        """The kills of a round; the next of its kind begins after them."""
        kills = dealt(seed, count, first=first, roles=self.roles, phases=self.phases, cold=self.cold, apart=self.apart)
        for kill in kills:
            kill.step += self.later
        return named(self.method, kills)


RANK = ("rank",)
UNSCORED = tuple(phase for phase in PHASES if phase != "reward")
"""Phases of a run whose environment alone scores: no worker is asked for a reward."""
ROUNDS: dict[str, Kind] = {
    "grpo": Kind("grpo", 18, 6.0, cold=0),
    "ppo": Kind("ppo", 18, 7.0, cold=3),
    "lag": Kind("lag", 5, 8.0, cold=5),
    "ranks": Kind("2 ranks", 7, 9.0, ("rank", "rollout"), cold=1),  # one dies while the other waits for it
    "episodes": Kind("episodes", 6, 9.0, ("rank", "rollout", "environment"), UNSCORED, cold=2),
    "drivers": Kind("grpo", 6, 23.0, ("driver",), apart=3, later=1),
    "drivers-episodes": Kind("episodes", 1, 30.0, ("driver",), later=1),
    "nodes": Kind("ppo", 6, 15.0, ("node",)),
    "partitions": Kind("ppo", 3, 25.0, ("partition",)),
    "nodes-cut": Kind("cut", 1, 25.0, ("node",)),
    "nodes-stages": Kind("stages", 1, 25.0, ("node",)),
    "zero1": Kind("zero1", 1, 10.0, RANK),
    "zero2": Kind("zero2", 1, 10.0, RANK),
    "servers": Kind("servers", 2, 20.0, ("rank", "server"), cold=None),
    "sharded": Kind("sharded", 1, 10.0, RANK),  # to send or save the parameters takes both ranks
    "cut": Kind("cut", 1, 10.0, RANK),  # ranks meet in every product
    "stages": Kind("stages", 1, 12.0, RANK),  # one has nothing to do where the other is not
    "square": Kind("square", 1, 20.0, RANK),
    "stages-sharded": Kind("stages-sharded", 1, 20.0, RANK),
    "mirrored": Kind("mirrored", 1, 15.0, RANK, later=2),  # checkpoints are further apart
    "grid": Kind("grid", 1, 20.0, RANK),
}
"""Eighty-three kills in all, of every role in every phase. Nodes that are cut off take three phases, and ranks or nodes
of each mesh one; the next rounds take others, with other freezes. Kills.py says how ranks share the model."""


def planned(kills: int, seed: int, only: str | None = None, *, without: Container[str] = ()) -> list[Round]:
    """Rounds of so many kills in all."""
    rounds: list[Round] = []
    kinds = itertools.cycle(kind for kind in ROUNDS if only == kind or (only is None and kind not in without))
    while kills > 0:
        name = next(kinds)
        kind, turn = ROUNDS[name], sum(done.kind == name for done in rounds)
        count = min(kind.count, kills)
        rounds.append(Round(name, len(rounds), kind.deal(seed, count, first=turn * kind.count)))
        kills -= count
    return rounds
