"""Schedules of pipelines, worked by hand, and what holds for all of them."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.learn.turns import Turn, source, target, turns


def written(made: list[list[Turn]]) -> list[str]:
    return [" ".join(f"{'FB'[turn.backward]}{'ab'[turn.span]}{turn.part}" for turn in one) for one in made]


def test_one_forward_one_backward() -> None:
    assert written(turns(3, 1, 4)) == [
        "Fa0 Fa1 Fa2 Ba0 Fa3 Ba1 Ba2 Ba3",
        "Fa0 Fa1 Ba0 Fa2 Ba1 Fa3 Ba2 Ba3",
        "Fa0 Ba0 Fa1 Ba1 Fa2 Ba2 Fa3 Ba3",
    ]


def test_interleaved_spans() -> None:
    """Figure 4 of Narayanan et al. 2021, with two stages and as many micro-batches as they."""
    assert written(turns(2, 2, 2)) == [
        "Fa0 Fa1 Fb0 Fb1 Bb0 Bb1 Ba0 Ba1",
        "Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1",
    ]


def test_without_gradients_all_go_forward_alike() -> None:
    assert written(turns(2, 2, 3, trains=False)) == ["Fa0 Fa1 Fa2 Fb0 Fb1 Fb2"] * 2


def timed(stages: int, spans: int, parts: int, *, trains: bool = True) -> tuple[float, int]:
    """Carry out a schedule, where each pass takes a unit. Return the share of time in which stages wait, and the most
    micro-batches in flight at the first one. Fails in a deadlock, and where a pass comes before its input."""
    lists = turns(stages, spans, parts, trains=trains)
    done: dict[tuple[int, Turn], int] = {}
    at, clock, held, most = [0] * stages, [0] * stages, 0, 0
    sent, taken = (defaultdict[tuple[bool, int, int], list[int]](list) for _ in range(2))
    while any(at[stage] < len(lists[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            if at[stage] == len(lists[stage]):
                continue
            turn = lists[stage][at[stage]]
            giver = source(turn, stage, stages, spans)
            ready = clock[stage]
            if giver is not None:
                crossed = (giver > stage) != turn.backward and giver != stage
                span = turn.span + (1 if turn.backward else -1) * crossed
                given = done.get((giver, Turn(turn.backward, span, turn.part)))
                if given is None:
                    continue
                ready = max(ready, given)
                taken[turn.backward, giver, stage].append(turn.part)
            if turn.backward:
                assert (stage, turn._replace(backward=False)) in done
            clock[stage] = done[stage, turn] = ready + 1
            taker = target(turn, stage, stages, spans)
            if taker is not None:
                sent[turn.backward, stage, taker].append(turn.part)
            at[stage] += 1
            held += 0 if stage else -1 if turn.backward else 1
            most, moved = max(most, held), True
        assert moved, "deadlock"
    assert sent == taken, "a stage takes what another one sends, in its order"
    assert len(done) == stages * spans * parts * (1 + trains)
    busy = sum(map(len, lists))
    return 1 - busy / (stages * max(clock)), most


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 13), st.booleans())
def test_a_schedule_is_carried_out_in_order_without_a_deadlock(
    stages: int, spans: int, parts: int, trains: bool
) -> None:
    timed(stages, spans, parts, trains=trains)


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (2, 4), (3, 7), (4, 4), (4, 16)])
def test_the_bubble_of_equal_passes(stages: int, parts: int) -> None:
    bubble, most = timed(stages, 1, parts)
    assert bubble == pytest.approx((stages - 1) / (parts + stages - 1))
    assert most == min(stages, parts)


@pytest.mark.parametrize(("stages", "spans", "parts"), [(2, 2, 4), (4, 2, 8), (2, 4, 8), (3, 3, 9)])
def test_spans_shorten_it(stages: int, spans: int, parts: int) -> None:
    """Of passes that are shorter by as much: Narayanan et al. 2021, section 2.2."""
    bubble, _ = timed(stages, spans, parts)
    assert bubble == pytest.approx((stages - 1) / (spans * parts + stages - 1))
