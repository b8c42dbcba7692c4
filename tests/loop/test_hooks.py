"""When hooks are due, and what they record."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from plaudit.batch import Batch
from plaudit.loop.hooks import (
    Due,
    RecordMetrics,
    validation_rewards,
)
from plaudit.loop.progress import Delivery, Moment, Progress
from plaudit.loop.settings import Every
from plaudit.runtime.worker import TooManyFailures
from plaudit.types import Completion, Finish, Group, Prompt, Response, Row, Score


def due_at(every: Every, moments: list[Progress], *, at_end: bool = False, resume: int | None = None) -> list[int]:
    due = Due(every, at_end=at_end, since=None if resume is None else moments[resume - 1])
    moments = moments[resume or 0 :]
    return [p.step for p in moments if due(p, last=p is moments[-1])]


# epochs 1 1 2 2 3 3 4 4 5 5
TEN = [Progress(step=n, epoch=1 + (n - 1) // 2, epochs_done=n / 2, seconds=10.0 * n) for n in range(1, 11)]


def test_what_every_may_say() -> None:
    assert Every.of(None) == Every()
    assert Every.of(100) == Every.of("100 steps") == Every(steps=100)
    assert Every.of("1 epoch") == Every(epochs=1)
    assert Every.of("0.05 epochs") == Every(epochs=0.05)
    assert Every.of("1.5 hours") == Every(seconds=5400.0)
    assert Every.of(["2 epochs", "10 minutes", 50]) == Every(steps=50, epochs=2, seconds=600.0)


@pytest.mark.parametrize(
    "given", [0, -1, True, 1.5, "1.5 steps", "0 epochs", "0 seconds", "soon", "", {"steps": 1}, ["1 day"]]
)
def test_what_every_may_not_say_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="number of steps"):
        Every.of(given)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (Every(), []),
        (Every(steps=3), [3, 6, 9]),
        (Every(epochs=1), [2, 4, 6, 8, 10]),
        (Every(epochs=2), [4, 8]),
        (Every(epochs=1.5), [3, 6, 9]),
        (Every(epochs=0.7), [2, 3, 5, 6, 7, 9, 10]),  # 0.7, 1.4, 2.1, 2.8, 3.5, 4.2, 4.9
        (Every(seconds=25.0), [3, 6, 9]),
        (Every(steps=3, epochs=2), [3, 4, 6, 8, 9]),
    ],
)
def test_due_by_steps_epochs_or_seconds(every: Every, expected: list[int]) -> None:
    assert due_at(every, TEN) == expected
    assert due_at(every, TEN, at_end=True) == sorted({*expected, 10})


@pytest.mark.parametrize("every", [Every(steps=3), Every(epochs=2), Every(epochs=0.7), Every(steps=4, epochs=3)])
@pytest.mark.parametrize("resume", range(1, 10))
def test_a_resumed_run_is_due_when_the_undisturbed_one_is(every: Every, resume: int) -> None:
    assert due_at(every, TEN, resume=resume) == [step for step in due_at(every, TEN) if step > resume]


def test_what_is_due_does_not_bring_itself_about() -> None:
    due = Due(Every(seconds=0.3), at_end=False)
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
        asyncio.run(validation_rewards(failing, prompts, failing, failing))


class Written(list[dict[str, Any]]):
    write = list.append


def group(index: int) -> Group:
    """Two answers to the prompt (1, 2): (3, 4), drawn by versions 7 and 8, and nothing."""
    drawn = Completion(tokens=(3, 4), logprobs=(-1.0, -2.0), versions=(8, 7), text="well", finish=Finish.EOS)
    nothing = Completion(tokens=(), logprobs=(), versions=(), text="", finish=Finish.LENGTH)
    return Group(
        index=index,
        prompt=Prompt(id="p", text="how", tokens=(1, 2)),
        responses=(
            Response(completion=drawn, trainable=(True, True), score=Score(value=3.0, parts={"rule": 2.0}), reward=1.5),
            Response(completion=nothing, trainable=(), score=Score(value=None, reason="too short"), reward=None),
        ),
    )


def moment(step: int, *, last: bool = False, **given: Any) -> Moment:
    delivery = Delivery(batch=None, epoch=1, groups=tuple(map(group, range(3))))
    stats = {"loss": 2.0, "time/step": 0.5}
    return Moment(progress=Progress(step=step, tokens=40), delivery=delivery, stats=stats, last=last, **given)


def test_a_record_by_hand() -> None:
    batch = Batch.of([Row(tokens=(1, 2, 3, 4), trainable=(False, False, True, True))])
    written = Written()
    for given, speed in ((batch, 8.0), (None, 0.0)):
        more = {"tokens": 40.0, "tokens_per_second": speed}
        assert asyncio.run(RecordMetrics(written)(moment(3, batch=given))) == more
        assert written.pop() == {"step": 3, "epoch": 1, "time": 0.0, "loss": 2.0, "time/step": 0.5} | more
