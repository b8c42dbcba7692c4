"""Which tokens rows share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plaudit.learn.prefixes import shared


def test_rows_that_begin_alike_by_hand() -> None:
    tokens, index = shared([[7, 8, 1], [9], [7, 8, 2, 3], [7, 8, 1]])
    assert tokens == [7, 8, 1, 2, 3, 9]
    assert index == [0, 1, 2, 5, 0, 1, 3, 4, 0, 1, 2]


def test_a_row_that_another_begins_with() -> None:
    assert shared([[4, 5, 6], [4, 5]]) == ([4, 5, 6], [0, 1, 2, 0, 1])


def test_equal_tokens_after_different_ones_are_not_shared() -> None:
    assert shared([[1, 5], [2, 5]]) == ([1, 5, 2, 5], [0, 1, 2, 3])


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(ROWS)
def test_every_prefix_is_computed_once_and_every_row_is_read_back(rows: list[list[int]]) -> None:
    tokens, index = shared(rows)
    assert [tokens[place] for place in index] == [token for row in rows for token in row]
    prefixes = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    assert len(tokens) == len(set(prefixes))
    assert len(set(zip(index, prefixes, strict=True))) == len(tokens)
