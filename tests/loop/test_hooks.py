"""When hooks are due, and what they record."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from assent.loop.hooks import Due, validation_rewards
from assent.loop.progress import Progress
from assent.loop.settings import EverySettings
from assent.runtime.worker import TooManyFailures


def due_at(
    every: EverySettings, moments: list[Progress], *, at_end: bool = False, resume: int | None = None
) -> list[int]:
    due = Due(every, at_end=at_end)
    if resume is not None:
        due.start(moments[resume - 1])
        moments = moments[resume:]
    return [p.step for p in moments if due(p, last=p is moments[-1])]


# epochs 1 1 2 2 3 3 4 4 5 5
TEN = [Progress(step=n, epoch=1 + (n - 1) // 2, epochs_done=n // 2, seconds=10.0 * n) for n in range(1, 11)]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (EverySettings(), []),
        (EverySettings(steps=3), [3, 6, 9]),
        (EverySettings(epochs=1), [2, 4, 6, 8, 10]),
        (EverySettings(epochs=2), [4, 8]),
        (EverySettings(seconds=25.0), [3, 6, 9]),
        (EverySettings(steps=3, epochs=2), [3, 4, 6, 8, 9]),
    ],
)
def test_due_by_steps_epochs_or_seconds(every: EverySettings, expected: list[int]) -> None:
    assert due_at(every, TEN) == expected
    assert due_at(every, TEN, at_end=True) == sorted({*expected, 10})


@pytest.mark.parametrize("every", [EverySettings(steps=3), EverySettings(epochs=2), EverySettings(steps=4, epochs=3)])
@pytest.mark.parametrize("resume", range(1, 10))
def test_a_resumed_run_is_due_when_the_undisturbed_one_is(every: EverySettings, resume: int) -> None:
    assert due_at(every, TEN, resume=resume) == [step for step in due_at(every, TEN) if step > resume]


def test_what_is_due_does_not_bring_itself_about() -> None:
    due = Due(EverySettings(seconds=0.3), at_end=False)
    assert not due(Progress(step=1, seconds=0.2), last=False)
    assert due(Progress(step=2, seconds=0.4), last=False)
    with due.apart():
        time.sleep(0.4)
    assert not due(Progress(step=3, seconds=0.9), last=False)
    assert due(Progress(step=4, seconds=3.0), last=False)


def test_what_ends_a_run_during_its_evaluation_is_raised_as_it_is() -> None:
    """The command line tells people of these, and of a group of errors nothing."""

    class Failing:
        async def rollout(self, index: int, prompt: Any) -> Any:
            if index:
                raise TooManyFailures("2 workers were lost")
            await asyncio.sleep(60)

    prompts: Any = [None] * 3
    failing: Any = Failing()
    with pytest.raises(TooManyFailures, match="2 workers were lost"):
        asyncio.run(validation_rewards(failing, prompts))
