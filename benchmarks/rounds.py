"""Which kills there are, and in which runs: every role in every phase, before any comes again.

kills in all, seed -> planned -> rounds, each a run's -> kills.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

from faults import Kill, dealt


def of_workers(method: str, seed: int, count: int, *, first: int = 0, cold: int = 0) -> list[Kill]:
    return named(method, dealt(seed, count, first=first, cold=cold))


def of_ranks(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of two ranks, one dies while the other waits for it."""
    return named("2 ranks", dealt(seed, count, first=first, roles=("rank", "rollout"), cold=1))


def of_sharded(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of two ranks with half of the parameters each: to send or save them takes both."""
    return named("sharded", dealt(seed, count, first=first, roles=("rank",), cold=None))


def of_cut(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of two ranks with half of each matrix: they meet in every product."""
    return named("cut", dealt(seed, count, first=first, roles=("rank",), cold=None))


def of_stages(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of two ranks with half of the layers each: one has nothing to do where the other is not."""
    return named("stages", dealt(seed, count, first=first, roles=("rank",), cold=None))


def of_square(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of four ranks, two stages of two with half of each matrix."""
    return named("square", dealt(seed, count, first=first, roles=("rank",), cold=None))


def of_grid(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of four ranks, two pairs with half of each matrix, which learn from other rows."""
    return named("grid", dealt(seed, count, first=first, roles=("rank",), cold=None))


def of_mirrored(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """Of two ranks with half of each matrix, whose states have copies: checkpoints are further apart."""
    kills = named("mirrored", dealt(seed, count, first=first, roles=("rank",), cold=None))
    for kill in kills:
        kill.step += 2
    return kills


def of_drivers(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    kills = named("grpo", dealt(seed, count, first=first, roles=("driver",), cold=None, apart=3))
    for kill in kills:
        kill.step += 1
    return kills


def of_nodes(method: str, seed: int, count: int, *, first: int = 0) -> list[Kill]:
    """With one rank (`ppo`), or with two that share each matrix (`cut`) or have half of the layers each (`stages`)."""
    return named(method, dealt(seed, count, first=first, roles=("node",), cold=None))


def of_partitions(seed: int, count: int, *, first: int = 0) -> list[Kill]:
    return named("ppo", dealt(seed, count, first=first, roles=("partition",), cold=None))


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
    """Of rounds. `deal(seed, count, first=...)` makes the kills of one; the next of its kind begins behind them."""

    deal: Callable[..., list[Kill]]
    count: int
    seconds: float
    """That a kill takes, about: on two cores, with the start of its run and the undisturbed one."""


ROUNDS: dict[str, Kind] = {
    "grpo": Kind(partial(of_workers, "grpo"), 18, 6.0),
    "ppo": Kind(partial(of_workers, "ppo", cold=3), 18, 7.0),
    "lag": Kind(partial(of_workers, "lag", cold=1), 5, 8.0),
    "ranks": Kind(of_ranks, 7, 9.0),
    "drivers": Kind(of_drivers, 6, 23.0),
    "nodes": Kind(partial(of_nodes, "ppo"), 6, 15.0),
    "partitions": Kind(of_partitions, 3, 25.0),
    "nodes-cut": Kind(partial(of_nodes, "cut"), 1, 25.0),
    "nodes-stages": Kind(partial(of_nodes, "stages"), 1, 25.0),
    "sharded": Kind(of_sharded, 1, 10.0),
    "cut": Kind(of_cut, 1, 10.0),
    "stages": Kind(of_stages, 1, 12.0),
    "square": Kind(of_square, 1, 20.0),
    "mirrored": Kind(of_mirrored, 1, 15.0),
    "grid": Kind(of_grid, 1, 20.0),
}
"""Seventy-one kills in all, of every role in every phase. Nodes that are cut off take three phases, and ranks or nodes
of each mesh one; the next rounds take others, with other freezes."""


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
