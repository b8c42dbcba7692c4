"""The search finds what trying everything finds, on random problems of up to 16 devices."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from plaudit.preflight.search import Call, Option, Problem, best, blocks, undominated


def problem(seed: int) -> Problem:
    """Two to four calls on 1 to 16 devices; a block's seconds and bytes depend on its size, as on a cluster."""
    chance = random.Random(seed)
    devices, count = chance.choice((1, 2, 4, 8, 16)), chance.choice((2, 3, 3, 4))
    calls: list[Call] = []
    for number in range(count):
        work, held = chance.uniform(1, 20), chance.uniform(0, 30)
        kinds = {size: (work / size**0.8 * chance.uniform(0.8, 1.2), held / size, chance.uniform(0, 20) / size)
                 for size in (1, 2, 4, 8, 16)}  # fmt: skip
        options = [Option(first, size, *kinds[size]) for first, size in blocks(devices)]
        if count == 4:
            sizes = chance.sample([1, 2, 4, 8, 16], 2)
            options = [one for one in options if one.count in sizes] or options[-1:]
        names = [call.name for call in calls]
        after = tuple(name for name in names if chance.random() < 0.5)
        moves = None
        if names and chance.random() < 0.4:
            seconds = chance.uniform(0, 2)
            moves = (
                chance.choice(names),
                lambda a, b, s=seconds: 0.0 if (a.first, a.count) == (b.first, b.count) else s,
            )
        calls.append(Call(f"call {number}", tuple(options), after, moves))
    return Problem(tuple(calls), devices, capacity=chance.choice((60.0, 25.0, 1e9)))


def by_trying(given: Problem) -> float | None:
    plans = itertools.product(*(call.options for call in given.calls))
    return min((given.seconds(plan) for plan in plans if given.fits(plan)), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_best_of_all_plans(seed: int) -> None:
    given = problem(seed)
    if given.plans > 6_000:
        pytest.skip("too many to try")
    expected, found = by_trying(given), best(given)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.proved
    assert found.seconds == pytest.approx(expected)
    assert given.seconds(found.plan) == found.seconds
    assert given.fits(found.plan)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_never_above_what_follows(seed: int) -> None:
    given, chance = problem(seed), random.Random(seed)
    for _ in range(50):
        plan = [chance.choice(call.options) for call in given.calls]
        bounds = [given.bound(plan[:count]) for count in range(1, len(plan) + 1)]
        assert max(bounds) <= given.seconds(plan) + 1e-9


def test_seconds_by_hand() -> None:
    """Two calls on one device take turns; on two, the second still waits for the first's result."""
    generate, judge = Option(0, 1, 3.0), Option(1, 1, 2.0)
    calls = (
        Call("generate", (generate,)),
        Call("judge", (judge,), after=("generate",)),
        Call("train", (Option(0, 2, 4.0),)),
    )
    assert Problem(calls, 2).ends([generate, judge, Option(0, 2, 4.0)]) == [3.0, 5.0, 9.0]
    assert Problem(calls, 2).seconds([generate, judge, Option(0, 2, 4.0)]) == 9.0


def test_what_is_slower_and_larger_on_the_same_devices_is_left_out() -> None:
    fast, slow, small = Option(0, 1, 1.0, 5.0), Option(0, 1, 2.0, 5.0), Option(0, 1, 2.0, 1.0)
    assert undominated([slow, small, fast]) == (fast, small)
    assert undominated([slow, fast], slack=1.5) == (fast, slow)


@pytest.mark.slow
def test_a_thousand_devices_take_seconds() -> None:
    calls = []
    for number in range(6):
        options = [
            Option(first, size, 100 * (number + 1) / size**0.9 + tensor, 400 / size, 10.0, tensor)
            for first, size in blocks(1024)
            for tensor in (1, 2, 4, 8)
            if tensor <= size
        ]
        calls.append(Call(str(number), undominated(options), after=(str(number - 1),) if number % 2 else ()))
    given = Problem(tuple(calls), 1024, capacity=80.0)
    begun = time.perf_counter()
    found = best(given)
    assert time.perf_counter() - begun < 60  # 10 s on a quiet machine: docs/plan.md
    assert found is not None
    assert given.fits(found.plan)
