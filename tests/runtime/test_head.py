"""People are told when a head is silent and when it answers again; a head that stays silent is the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from waiting import until

from plaudit.runtime.head import HeadWatch, parting

pytestmark = pytest.mark.slow

Made = Callable[..., HeadWatch]


@pytest.fixture
def watch() -> Iterator[Made]:
    made: list[HeadWatch] = []

    def make(ask: Callable[[], object], **more: object) -> HeadWatch:
        made.append(HeadWatch(ask, **{"timeout": 0.2, "patience": 60.0, **more}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_nothing_is_said_of_a_head_that_answers(watch: Made) -> None:
    said: list[str] = []
    asked: list[float] = []
    watch(lambda: asked.append(time.monotonic()) or True, say=said.append)  # type: ignore[func-returns-value]
    until(lambda: len(asked) > 12)
    assert said == []
    assert asked[12] - asked[0] > 11 * 0.05, "it is asked four times within the time it has for an answer, no more"


@pytest.mark.parametrize("how", ["waits", "raises", "knows nobody"])
def test_a_head_that_is_silent_for_a_while(watch: Made, how: str) -> None:
    said: list[str] = []
    silent, answers = threading.Event(), threading.Event()

    def ask() -> bool:
        if silent.is_set() and not answers.is_set():
            if how == "waits":
                answers.wait()
            if how == "raises":
                raise RuntimeError("unavailable")
            return False
        return True

    ended: list[int] = []
    watch(ask, say=said.append, end=lambda: ended.append(1))
    silent.set()
    until(lambda: said)
    assert "no sign for 0.2 s (runtime.heartbeat_timeout). Unless it does within 60 s more" in said[0]
    answers.set()
    until(lambda: len(said) == 2)
    assert said[1] == "the cluster's head answers again"
    assert not ended


def test_a_head_that_stays_silent_is_the_end_once(watch: Made) -> None:
    said: list[str] = []
    ended: list[int] = []
    began = time.monotonic()
    watch(lambda: False, say=said.append, patience=0.4, again="start another", end=lambda: ended.append(1))
    until(lambda: ended)
    assert time.monotonic() - began > 0.2 + 0.4
    time.sleep(0.3)
    assert (len(said), len(ended)) == (2, 1)
    assert said[0].endswith("this run ends: start another")
    assert said[1] == "the cluster's head is lost: start another"


@pytest.mark.parametrize("how", ["raises", "never returns"])
def test_the_end_does_not_wait_for_who_is_told(watch: Made, how: str) -> None:
    ended = threading.Event()

    def say(text: str) -> None:
        if how == "raises":
            raise OSError("nobody reads it")
        threading.Event().wait()

    watch(lambda: False, say=say, patience=0.4, end=ended.set)
    assert ended.wait(20)


def test_there_is_time_between_both_messages_however_long_the_pauses(watch: Made) -> None:
    said: list[float] = []
    ended = threading.Event()
    began = time.monotonic()
    watch(lambda: False, say=lambda text: said.append(time.monotonic()), timeout=2.0, patience=0.1, end=ended.set)
    assert ended.wait(20)
    assert said[0] - began > 2.0 + 0.4, "a sign that is late by less than a question is one in time"
    assert said[1] - said[0] > 0.2


def test_closing_ends_both_threads() -> None:
    watch = HeadWatch(lambda: True, timeout=0.2, patience=1.0, say=print)
    watch.close()
    assert not any(thread.is_alive() for thread in watch._threads)


def test_a_farewell_ends_in_time() -> None:
    said: list[str] = []
    ended = threading.Event()
    with parting(0.1, said.append, ended.set):
        assert ended.wait(20)
    (told,) = said
    assert told.startswith("the cluster's head has not answered this run's goodbye for 0.1 s")
    with parting(0.1, said.append, pytest.fail):
        pass
    time.sleep(0.2)
    assert len(said) == 1
