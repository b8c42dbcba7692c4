"""The order of draws is a pure function of seed and draw number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.cursor import Cursor

PINNED = [7, 4, 5, 1, 6, 2, 0, 3]
PINNED_MIXTURE = [0, 2, 3, 1, 2, 5]

COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def epoch(cursor, number):
    return [cursor.item(number * cursor.length + i) for i in range(cursor.length)]


@given(counts=COUNTS, seed=st.integers(0, 2**40), number=st.integers(0, 50))
def test_without_weights_every_epoch_is_a_permutation(counts, seed, number):
    cursor = Cursor(counts, seed=seed)
    assert sorted(epoch(cursor, number)) == list(range(sum(counts)))
    assert cursor.epoch(number * cursor.length) == number


@given(counts=COUNTS, data=st.data(), shuffle=st.booleans(), number=st.integers(0, 9))
def test_shares_follow_the_weights_to_within_one_row(counts, data, shuffle, number):
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(counts), max_size=len(counts)))
    cursor = Cursor(counts, weights=weights, shuffle=shuffle)
    drawn = epoch(cursor, number)
    start = 0
    for count, weight in zip(counts, weights, strict=True):
        share = sum(start <= item < start + count for item in drawn)
        assert abs(share - weight / sum(weights) * cursor.length) < 1
        start += count


@given(counts=COUNTS, data=st.data(), epochs=st.integers(1, 6))
def test_a_source_goes_on_where_it_stopped_so_its_items_are_drawn_equally_often(counts, data, epochs):
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(counts), max_size=len(counts)))
    cursor = Cursor(counts, weights=weights)
    drawn = [item for number in range(epochs) for item in epoch(cursor, number)]
    start = 0
    for count in counts:
        times = [drawn.count(item) for item in range(start, start + count)]
        assert max(times) - min(times) <= 1
        start += count


def test_what_is_left_over_goes_to_the_largest_remainder():
    # 1.3, 3.7 and 5 of 10 draws: 1, 3 and 5 whole ones, and the tenth to the 0.7
    assert Cursor((4, 3, 3), weights=(0.13, 0.37, 0.5)).quotas == (1, 4, 5)


def test_draws_depend_on_nothing_but_seed_and_number():
    first, again, other = Cursor(100, seed=3), Cursor(100, seed=3), Cursor(100, seed=4)
    forwards = [first.item(draw) for draw in range(250)]
    assert [again.item(draw) for draw in reversed(range(250))] == forwards[::-1]
    assert [other.item(draw) for draw in range(250)] != forwards
    assert forwards[:100] != forwards[100:200]


def test_the_order_stays_the_same_across_versions():
    # Written down once: a change here would break the resumption of every run on disk.
    assert epoch(Cursor(8, seed=1), 0) == PINNED
    assert epoch(Cursor((3, 3), weights=(2, 1), seed=1), 1) == PINNED_MIXTURE


def test_unshuffled_sources_keep_their_order_and_are_interleaved():
    assert epoch(Cursor((2, 3), shuffle=False), 1) == [0, 1, 2, 3, 4]
    # quotas 4 and 2 of 6: places 1/8 3/8 5/8 7/8 and 1/4 3/4
    assert epoch(Cursor((3, 3), weights=(2, 1), shuffle=False), 0) == [0, 3, 1, 2, 4, 0]


def test_what_cannot_be_drawn_from_is_refused():
    for arguments in ({"counts": 0}, {"counts": (2, 0), "weights": (1, 1)}, {"counts": 2, "seed": -1}):
        with pytest.raises(ValueError, match=r"counts|seed"):
            Cursor(**arguments)
    with pytest.raises(ValueError, match="give one each"):
        Cursor((2, 2), weights=(1,))
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive and finite"):
            Cursor((2, 2), weights=(1, weight))
    with pytest.raises(IndexError):
        Cursor(2).item(-1)
