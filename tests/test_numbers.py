"""`Numbers` reads like a tuple, and is copied and sent like an array."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from plaudit.types import Numbers


def test_they_are_equal_to_the_tuple_and_hash_as_it_does() -> None:
    tokens = Numbers("i", [5, 6, 7])
    assert tokens == (5, 6, 7)
    assert tokens == (5, 6, 7)
    assert tokens != (5, 6)
    assert tokens != Numbers("i", [5, 6, 8])
    assert tokens != "567"
    assert tokens != 5
    assert tokens[1:] == (6, 7)
    assert tokens[-1] == 7
    assert (4, *tokens) == (4,) + tokens == (4, 5, 6, 7)  # noqa: RUF005
    assert tokens + (8,) == (5, 6, 7, 8)  # noqa: RUF005
    assert {tokens: "found"}[(5, 6, 7)] == "found"  # type: ignore[index]
    assert Numbers("b", [True, False]) == (True, False)
    assert Numbers("f", [-0.5]) == pytest.approx((-0.5,))


def test_they_travel_as_bytes_and_become_arrays_without_objects() -> None:
    values = np.array([random.Random(0).random() for _ in range(1000)], dtype=np.float32)
    sent = pickle.dumps(Numbers("f", values.tolist()), protocol=5)
    assert len(sent) < 4 * 1000 + 200
    found = pickle.loads(sent)
    assert type(found) is Numbers
    assert np.array_equal(np.asarray(found, np.float32), values), "float32 comes back to the last bit"
    assert np.asarray(Numbers("b", [1, 0]), bool).tolist() == [True, False]
