"""Percentiles by hand."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.report import Lengths, Tally


def test_nearest_rank_percentiles():
    # of 1..20: rank ceil(0.05 * 20) = 1, ceil(0.5 * 20) = 10, ceil(0.95 * 20) = 19
    assert Lengths.of(Counter(range(20, 0, -1))) == Lengths(count=20, p5=1, p50=10, p95=19, max=20)
    assert Lengths.of({7: 1}) == Lengths(count=1, p5=7, p50=7, p95=7, max=7)
    assert Lengths.of({}) == Lengths()


@given(st.lists(st.integers(0, 9), min_size=1))
def test_percentiles_are_lengths_that_occur_in_rising_order(lengths):
    of = Lengths.of(Counter(lengths))
    assert min(lengths) <= of.p5 <= of.p50 <= of.p95 <= of.max == max(lengths)
    assert {of.p5, of.p50, of.p95} <= set(lengths)


def test_only_the_first_bad_rows_are_quoted_but_all_are_counted():
    report = Tally(source="f", bad=[f"f:{i}: bad" for i in range(9)]).freeze()
    assert report.bad_rows == 9
    assert report.bad_examples == tuple(f"f:{i}: bad" for i in range(5))
