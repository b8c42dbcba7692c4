"""The simulation of overlap on lengths whose times can be worked out by hand."""

from __future__ import annotations

import asyncio

import overlap
import pytest
from overlap import Case, SimulatedLoop, Timed

from plaudit.types import Sampling


def test_answers_of_one_length() -> None:
    """Generating takes 10 x 0.03 s and learning as long: one after the other 0.6 s, overlapped 0.3 s."""
    lengths = [10]
    alone = overlap.run(Case(workers=2, lag=0, interrupt=True, lengths=lengths))
    assert (alone.seconds, alone.busy, alone.age) == pytest.approx((0.6, 0.5, 0.0))
    both = overlap.run(Case(workers=2, lag=1, interrupt=True, lengths=lengths))
    assert (both.seconds, both.busy, both.age) == pytest.approx((0.3, 1.0, 1.0))


def test_long_answers_gain_from_more_lag_unless_weights_wait_for_them() -> None:
    lengths = [10] * 63 + [100]
    found = [overlap.run(Case(2, lag, interrupt, lengths)) for lag, interrupt in ((0, True), (2, True), (2, False))]
    sync, interrupted, waited = (outcome.seconds for outcome in found)
    assert interrupted < 0.6 * sync
    assert interrupted < 0.8 * waited
    assert 0 < found[1].age < found[2].age <= 2


def test_tokens_carry_the_version_that_was_there() -> None:
    """Twelve tokens of 0.03 s; new weights come after 0.12 s."""

    async def steps() -> tuple[int, ...]:
        engine = Timed([12])
        engine.load(None, 3)
        asked = asyncio.ensure_future(engine.generate([1], [Sampling()]))
        await asyncio.sleep(0.12)
        engine.load(None, 4)
        return (await asked)[0].versions

    loop = SimulatedLoop()
    assert loop.run_until_complete(steps()) == (3,) * 4 + (4,) * 8
    loop.close()
