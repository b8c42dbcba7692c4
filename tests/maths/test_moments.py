"""Running mean and deviation."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from plaudit.maths.moments import Moments


def test_before_the_first_update_normalising_is_the_identity() -> None:
    assert (Moments().mean, Moments().std) == (0.0, 1.0)


def test_updates_by_hand() -> None:
    first = Moments().updated(2.0, 5.0, decay=0.9)
    # 0.1 * 2 / 0.1 = 2: the debiasing forgets the zero it started from. Variance 5 - 4.
    assert (first.mean, first.std) == (pytest.approx(2.0), pytest.approx(1.0))
    second = first.updated(4.0, 17.0, decay=0.9)
    # (0.9 * 0.2 + 0.1 * 4) / (0.9 * 0.1 + 0.1) = 0.58 / 0.19; squares (0.45 + 1.7) / 0.19
    assert second.mean == pytest.approx(0.58 / 0.19)
    assert second.std == pytest.approx((2.15 / 0.19 - (0.58 / 0.19) ** 2) ** 0.5)


def test_a_steady_stream_is_known_exactly_from_the_first_step() -> None:
    moments = Moments()
    for _ in range(5):
        moments = moments.updated(-3.0, 13.0, decay=0.99)
        assert (moments.mean, moments.std) == (pytest.approx(-3.0), pytest.approx(2.0))


def test_the_deviation_has_a_floor() -> None:
    assert Moments().updated(1.0, 1.0, decay=0.9).std == pytest.approx(0.01)


def test_the_fields_are_the_whole_state() -> None:
    moments = Moments().updated(2.0, 5.0, decay=0.9)
    assert Moments(**asdict(moments)) == moments
