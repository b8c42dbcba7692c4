"""What is said of lost workers."""

from __future__ import annotations

import pytest

from plaudit.runtime.worker import Failures, TooManyFailures, WorkerLost


@pytest.mark.parametrize(("most", "told"), [(0, "1 worker was lost"), (3, "4 workers were lost")])
def test_one_lost_worker_too_many_is_said_in_sentences(most: int, told: str) -> None:
    """Ray's own reasons end with a full stop, which stood there twice."""
    failures = Failures(most)
    for number in range(most):
        failures(WorkerLost(f"rank {number}", "its process ended."))
    with pytest.raises(TooManyFailures) as e:
        failures(WorkerLost(f"rank {most}", "its process ended."))
    last = "; ".join(f"rank {number}: its process ended" for number in range(most + 1)[-3:])
    assert str(e.value) == (
        f"{told}, more than runtime.max_failures={most} allows: {last}. "
        "Nothing that was committed is lost: resume=latest goes on"
    )
