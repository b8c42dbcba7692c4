"""Schedules of pipelines, worked by hand, and what holds for all of them."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.learn.turns import Turn, source, target, ticks, turns


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
            before = source(turn, stage, stages, spans)
            ready = clock[stage]
            if before is not None:
                assert target(before[1], before[0], stages, spans) == (stage, turn)
                given = done.get(before)
                if given is None:
                    continue
                ready = max(ready, given)
                taken[turn.backward, before[0], stage].append(turn.part)
            if turn.backward:
                assert (stage, turn._replace(backward=False)) in done
            clock[stage] = done[stage, turn] = ready + 1
            after = target(turn, stage, stages, spans)
            if after is not None:
                sent[turn.backward, stage, after[0]].append(turn.part)
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


def test_ticks_of_one_forward_one_backward() -> None:
    """Figure 4 of Narayanan et al. 2019, with passes of equal length."""
    made = ticks(2, 1, 3)
    assert [
        " ".join("." if turn is None else f"{'FB'[turn.backward]}{turn.part}" for turn in one)
        for one in zip(*made, strict=True)
    ] == ["F0 F1 . B0 F2 B1 . B2", ". F0 B0 F1 B1 F2 B2 ."]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 13), st.booleans())
def test_batches_in_the_order_of_ticks_never_wait_for_each_other(
    stages: int, spans: int, parts: int, trains: bool
) -> None:
    """As with NCCL: a rank's next batch begins when its last one has ended, and a batch ends when each of its sends and
    receives has met its counterpart in the other rank's current batch. Every input comes before its pass."""
    table = ticks(stages, spans, parts, trains=trains)
    lists = turns(stages, spans, parts, trains=trains)
    assert [[turn for turn in one if turn] for one in zip(*table, strict=True)] == lists
    batches: list[list[tuple[int, set[tuple[int, int]]]]] = [[] for _ in range(stages)]
    arrived: dict[tuple[int, Turn], int] = {}
    for now, tick in enumerate(table):
        edges = {stage: target(turn, stage, stages, spans) for stage, turn in enumerate(tick) if turn is not None}
        for rank in range(stages):
            mine = {(giver, to[0]) for giver, to in edges.items() if to is not None and rank in (giver, to[0])}
            batches[rank] += [(now, mine)] if mine else []
        arrived |= {to: now for to in edges.values() if to is not None}
    for now, tick in enumerate(table):
        for stage, turn in enumerate(tick):
            assert turn is None or arrived.get((stage, turn), -1) < now
    while any(batches):
        heads = [one[0] if one else (-1, set[tuple[int, int]]()) for one in batches]
        ended = [
            rank
            for rank, (now, edges) in enumerate(heads)
            if edges and all(heads[other][0] == now and edge in heads[other][1] for edge in edges for other in edge)
        ]
        assert ended, "a deadlock"
        for rank in ended:
            batches[rank].pop(0)
