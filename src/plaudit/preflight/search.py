"""Find the best placement of calls on devices: dominance, branch and bound, and annealing for large problems.

    calls with options (devices, mesh, seconds, bytes) -> bounds -> branch and bound -> Found

A call is one model's work, or that of several which share their processes. An option puts it on neighbouring devices.
Calls on the same device take turns, and a call begins when those before it have ended. Left out: what a call takes,
which the options say (`cost.py`, `cluster.py`), and steps that overlap.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MANY = 1_000_000
"""With more possible plans than this, annealing runs first, to give branch and bound a good plan."""
TURNS = 15_000
"""Number of annealing steps from each start plan."""
NODES = 120_000
"""With more than SMALL devices, branch and bound stops, without a proof, after this many partial plans."""
SMALL = 16
RISES = 1e-9


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a call: on which devices, in which time, with how much memory."""

    first: int
    """Number of its first device."""
    count: int
    seconds: float
    held: float = 0.0
    """Bytes that the call holds on each of its devices for the whole step."""
    peak: float = 0.0
    """Further bytes on each device while the call works."""
    mesh: Any = None

    @property
    def last(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Call:
    name: str
    options: tuple[Option, ...]
    after: tuple[str, ...] = ()
    """Names of the calls whose results this one needs; they come before it in the problem."""
    moves: tuple[str, Callable[[Option, Option], float]] | None = None
    """Name of an earlier call with the same model, and the seconds to move its weights from one option to another."""


@dataclass(frozen=True)
class Found:
    plan: tuple[Option, ...]
    seconds: float
    proved: bool
    """True if the search proved that no plan is faster."""
    looked: int
    """Number of plans and partial plans that were examined."""


@dataclass(frozen=True)
class Problem:
    """Calls, each after those whose results it needs. A call has the same options on all aligned blocks of a size
    (`blocks`)."""

    calls: tuple[Call, ...]
    devices: int
    capacity: float = math.inf
    """Bytes of memory of a device."""

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        places = {call.name: number for number, call in enumerate(self.calls)}
        return [tuple(places[name] for name in call.after) for call in self.calls]

    @cached_property
    def sources(self) -> list[int | None]:
        places = {call.name: number for number, call in enumerate(self.calls)}
        return [None if call.moves is None else places[call.moves[0]] for call in self.calls]

    @cached_property
    def by_block(self) -> dict[str, dict[tuple[int, int], list[Option]]]:
        """{call: {(first device, number of devices): its options there}}."""
        found: dict[str, dict[tuple[int, int], list[Option]]] = {call.name: {} for call in self.calls}
        for call in self.calls:
            for one in call.options:
                found[call.name].setdefault((one.first, one.count), []).append(one)
        return found

    @property
    def plans(self) -> int:
        return math.prod(len(call.options) for call in self.calls)

    # --- a plan

    def ends(self, plan: Sequence[Option]) -> list[float]:
        """Return the second at which each call of a whole or partial plan ends. Calls get devices in their order."""
        found: list[float] = []
        for number, one in enumerate(plan):
            start = max((found[k] for k in self.before[number]), default=0.0)
            source, moves = self.sources[number], self.calls[number].moves
            if source is not None and moves is not None:
                start += moves[1](plan[source], one)
            for k in range(number):
                other = plan[k]
                if other.first < one.first + one.count and one.first < other.first + other.count:
                    start = max(start, found[k])
            found.append(start + one.seconds)
        return found

    def seconds(self, plan: Sequence[Option]) -> float:
        """Return the seconds of a step with this plan: when its last call ends."""
        return max(self.ends(plan))

    def fits(self, plan: Sequence[Option]) -> bool:
        """True if no device needs more memory than it has, in a plan or the first calls of one."""
        if self.capacity == math.inf:
            return True
        if sum(one.held * one.count for one in plan) + self.least_held[len(plan)] > self.devices * self.capacity:
            return False
        for place in {one.first for one in plan}:
            here = [one for one in plan if one.first <= place < one.last]
            if sum(one.held for one in here) + max(one.peak for one in here) > self.capacity:
                return False
        return True

    # --- bounds

    @cached_property
    def least(self) -> list[float]:
        return [min(one.seconds for one in call.options) for call in self.calls]

    @cached_property
    def area(self) -> list[float]:
        """For each call, the least device-seconds of it and all later calls together."""
        least = [min(one.seconds * one.count for one in call.options) for call in self.calls]
        return [sum(least[number:]) for number in range(len(least) + 1)]

    @cached_property
    def least_held(self) -> list[float]:
        """For each call, the least bytes (over all devices) of it and all later calls together."""
        least = [min(one.held * one.count for one in call.options) for call in self.calls]
        return [sum(least[number:]) for number in range(len(least) + 1)]

    def bound(self, plan: Sequence[Option]) -> float:
        """Return a lower bound of a step's seconds with this partial plan: each further call takes its least time and
        waits only for results, and the work fills all devices."""
        ends = self.ends(plan)
        for number in range(len(plan), len(self.calls)):
            start = max((ends[k] for k in self.before[number]), default=0.0)
            ends.append(start + self.least[number])
        used = sum(one.seconds * one.count for one in plan) + self.area[len(plan)]
        return max(max(ends), used / self.devices)


def undominated(options: Sequence[Option], slack: float = 0.0) -> tuple[Option, ...]:
    """Drop options that another option on the same devices beats in time and memory, even with `slack` s of moves."""
    best: list[Option] = []
    for _, same in itertools.groupby(sorted(options, key=lambda o: (o.first, o.count, o.seconds)), _where):
        chosen: list[Option] = []
        for one in same:
            if not any(b.seconds + slack <= one.seconds and b.held <= one.held and b.peak <= one.peak for b in chosen):
                chosen.append(one)
        best += chosen
    return tuple(sorted(best, key=lambda one: (one.seconds, one.held)))


def _where(one: Option) -> tuple[int, int]:
    return one.first, one.count


def best(problem: Problem) -> Found | None:
    """Return the fastest plan that fits; None if none does. Proved up to SMALL devices; beyond, if NODES suffice."""
    if not all(call.options for call in problem.calls):
        return None
    annealed = _annealed(problem) if problem.plans > MANY else None
    search = _Search(problem, annealed, math.inf if problem.devices <= SMALL else NODES)
    search.go([])
    if search.plan is None:
        return None
    return Found(tuple(search.plan), search.seconds, search.looked <= search.nodes, search.looked)


class _Search:
    def __init__(self, problem: Problem, begin: tuple[Option, ...] | None, nodes: float):
        self.problem, self.nodes, self.looked = problem, nodes, 0
        self.plan: Sequence[Option] | None = begin
        self.seconds = problem.seconds(begin) if begin else math.inf

    def go(self, plan: list[Option]) -> None:
        """Try every option of the next call, the one with the least bound first."""
        problem = self.problem
        if len(plan) == len(problem.calls):
            seconds = problem.seconds(plan)
            if seconds < self.seconds - RISES:
                self.plan, self.seconds = list(plan), seconds
            return
        tried: list[tuple[float, int, list[Option]]] = []
        for one in self._next(plan):
            self.looked += 1
            if self.looked > self.nodes:
                return
            further = [*plan, one]
            bound = problem.bound(further)
            if bound < self.seconds - RISES and problem.fits(further):
                tried.append((bound, len(tried), further))
        for bound, _, further in sorted(tried, key=lambda one: one[:2]):
            if bound < self.seconds - RISES and self.looked <= self.nodes:
                self.go(further)

    def _next(self, plan: Sequence[Option]) -> Iterator[Option]:
        """Yield the next call's options, on one block of each kind (`unlike`)."""
        options = self.problem.by_block[self.problem.calls[len(plan)].name]
        for block in unlike(plan, self.problem.devices):
            yield from options.get(block, ())


def unlike(plan: Sequence[Option], devices: int) -> Iterator[tuple[int, int]]:
    """Yield aligned blocks, one of those that are alike: two halves of a block are, if the same calls cover each."""
    first, size = 0, 1 << (devices.bit_length() - 1)
    while size:
        if first + size <= devices:
            yield from _within(plan, first, size)
            first += size
        else:
            size //= 2


def _within(plan: Sequence[Option], first: int, size: int) -> Iterator[tuple[int, int]]:
    yield first, size
    if size == 1:
        return
    half = size // 2
    covers = [_cover(plan, start, half) for start in (first, first + half)]
    yield from _within(plan, first, half)
    if covers[0] is None or covers[0] != covers[1]:
        yield from _within(plan, first + half, half)


def _cover(plan: Sequence[Option], first: int, size: int) -> int | None:
    """Return the calls that cover a whole block, as bits; None if a call covers only a part of it."""
    found = 0
    for number, one in enumerate(plan):
        if one.first < first + size and first < one.last:
            if one.first > first or one.last < first + size:
                return None
            found |= 1 << number
    return found


def _annealed(problem: Problem) -> tuple[Option, ...] | None:
    """Anneal: change one call's option a turn, and accept worse plans ever more rarely. None if no good plan fits."""
    chance, found = random.Random(0), list[tuple[float, int, list[Option]]]()
    for begin in _begins(problem):
        plan, seconds = list(begin), _priced(problem, begin)
        found = found if found and found[0][0] <= seconds else [(seconds, 0, begin)]
        for turn in range(TURNS):
            heat = 0.2 * (1 - turn / TURNS) ** 2 + 1e-6
            number = chance.randrange(len(plan))
            before = plan[number]
            plan[number] = chance.choice(problem.calls[number].options)
            now = _priced(problem, plan)
            if now <= seconds or chance.random() < math.exp((seconds - now) / (heat * seconds)):
                seconds = now
                if seconds < found[0][0]:
                    found = [(seconds, 0, list(plan))]
            else:
                plan[number] = before
    plan = min(found)[2] if found else []
    return tuple(plan) if plan and problem.fits(plan) else None


def _begins(problem: Problem) -> list[list[Option]]:
    """Return two start plans, the best of: each call's fastest option; by mesh, each call on most devices."""
    plans = [[min(call.options, key=lambda one: one.seconds) for call in problem.calls]]
    for mesh in {one.mesh for call in problem.calls for one in call.options}:
        alike = [[one for one in call.options if one.mesh == mesh] for call in problem.calls]
        if all(alike):
            plans.append([max(options, key=lambda one: (one.count, -one.first)) for options in alike])
    return sorted(plans, key=lambda plan: _priced(problem, plan))[:2]


def _priced(problem: Problem, plan: Sequence[Option]) -> float:
    """Return a step's seconds, times three if the plan does not fit: annealing may pass through such plans."""
    return problem.seconds(plan) * (1 if problem.fits(plan) else 3)


def blocks(devices: int) -> Iterator[tuple[int, int]]:
    """Yield aligned blocks of devices (first, size); sizes are powers of two: parts of a node, or whole nodes."""
    size = 1
    while size <= devices:
        yield from ((first, size) for first in range(0, devices - size + 1, size))
        size *= 2
