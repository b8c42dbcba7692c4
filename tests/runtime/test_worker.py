"""What is said of lost workers."""

from __future__ import annotations

import pytest

from plaudit.runtime.worker import HOUR, Failures, TooManyFailures, WorkerLost


@pytest.mark.parametrize(("most", "told"), [(0, "1 worker was lost"), (3, "4 workers were lost")])
def test_one_lost_worker_too_many_is_said_in_sentences(most: int, told: str) -> None:
    """Ray's own reasons end with a full stop, which stood there twice."""
    failures = Failures(most)
    for number in range(most):
        failures(WorkerLost(f"rank {number}", "its process ended."))
    with pytest.raises(TooManyFailures) as e:
        failures(WorkerLost(f"rank {most}", "its process ended."))
    last = "; ".join(f"rank {number}: its process ended" for number in range(most + 1)[-3:])
    assert str(e.value) == f"{told} within an hour, more than runtime.max_failures_per_hour={most} allows: {last}."


def test_only_what_was_lost_within_an_hour_counts() -> None:
    """Two an hour for a week are within a limit of two; a third within an hour is not, and the message names those."""
    now = [0.0]
    failures = Failures(2, clock=lambda: now[0])
    for half_hours in range(336):
        now[0] = half_hours * HOUR / 2
        failures(WorkerLost(f"rank {half_hours}", "its node was taken"))
    week = now[0]
    for minutes in (60, 119):
        now[0] = week + 60.0 * minutes
        failures(WorkerLost(f"minute {minutes}", "died"))
    now[0] = week + 60.0 * 119.5
    with pytest.raises(TooManyFailures, match=r"^3 workers .*: minute 60: died; minute 119:"):
        failures(WorkerLost("minute 119.5", "died"))
    assert len(failures.lost) == 339, "the page shows the latest of all"
