"""A queue of questions that background tasks answer, and of the callers that wait for answers.

    ask -> waiting -> taken by a task in the background -> answer, one by one -> all answers of a call, in its order

Used by everything that answers in the background: engines, judges and reward servers. Left out: who is asked, and how
many questions at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class _Call(Generic[Question, Answer]):
    questions: Sequence[Question]
    future: asyncio.Future[list[Answer]]
    answers: dict[Question, Answer] = field(default_factory=dict)


class Queue(Generic[Question, Answer]):
    """Each question is an object of its own; two with the same content differ (`eq=False` in a dataclass).

    work: coroutine function that takes questions until none is left and answers each. It runs while questions wait, in
    at most `tasks` tasks at once. Its exception is raised in every caller; if it is cancelled, all callers are.
    withdrawn: receives questions whose caller was cancelled. failed: is called after every caller got the error.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        tasks: int = 1,
        withdrawn: Callable[[Collection[Question]], None] = lambda questions: None,
        failed: Callable[[BaseException | None], None] = lambda error: None,
    ):
        self._work, self._most, self._withdrawn, self._failed = work, tasks, withdrawn, failed
        self.waiting: deque[Question] = deque()
        self._calls: dict[Question, _Call[Question, Answer]] = {}  # every question without an answer, in order
        self._tasks: list[asyncio.Task[None]] = []
        self._held = False

    async def ask(self, questions: Sequence[Question], *, ahead: bool = False) -> list[Answer]:
        """Return the answers in order, once all are there. With `ahead`, these questions are taken before those that
        wait. Raises the error of `work`."""
        if not questions:
            return []
        call: _Call[Question, Answer] = _Call(questions, asyncio.get_running_loop().create_future())
        self._calls.update(dict.fromkeys(questions, call))
        if ahead:
            self.waiting.extendleft(reversed(questions))
        else:
            self.waiting += questions
        self._wake()
        try:
            return await call.future
        except asyncio.CancelledError:
            gone = {question for question in questions if self._calls.pop(question, None) is not None}
            self.waiting = deque(question for question in self.waiting if question not in gone)
            self._withdrawn(gone)
            raise

    @property
    def unanswered(self) -> list[Question]:
        """Questions without an answer, in the order of asking."""
        return list(self._calls)

    @property
    def busy(self) -> bool:
        """True if some question has no answer yet."""
        return bool(self._calls)

    @property
    def under_way(self) -> int:
        """Questions that have been taken and have no answer yet."""
        return len(self._calls) - len(self.waiting)

    @property
    def open(self) -> bool:
        """True if some question may be taken."""
        return bool(self.waiting) and not self._held

    def __contains__(self, question: Question) -> bool:
        """True if the question's caller still waits for its answer."""
        return question in self._calls and not self._calls[question].future.done()

    def take(self, most: float = math.inf) -> list[Question]:
        """Take the next questions whose callers still wait, at most `most` of them."""
        taken: list[Question] = []
        while self.open and len(taken) < most:
            question = self.waiting.popleft()
            if question in self:
                taken.append(question)
        return taken

    def answer(self, question: Question, answer: Answer) -> None:
        """Store an answer; a call returns once all of its answers are there. Do nothing if the caller was cancelled."""
        call = self._calls.pop(question, None)
        if call is None:
            return
        call.answers[question] = answer
        if len(call.answers) == len(call.questions) and not call.future.done():
            call.future.set_result([call.answers[question] for question in call.questions])

    def again(self) -> list[Question]:
        """Put all unanswered questions back into `waiting`, in the order of asking, and return them."""
        self.waiting = deque(self._calls)
        return self.unanswered

    async def drain(self) -> None:
        """Wait until every taken question is answered. No further question is taken until `go_on`."""
        self._held = True
        while self.under_way:
            await asyncio.sleep(0)

    def go_on(self) -> None:
        self._held = False
        self._wake()

    def fail(self, error: BaseException | None) -> None:
        """Give every caller the error, or cancel them for None."""
        calls = dict.fromkeys(self._calls.values())
        self._calls, self.waiting = {}, deque()
        for call in calls:
            if not call.future.done():
                call.future.cancel() if error is None else call.future.set_exception(error)
        self._failed(error)

    def _wake(self) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        for _ in range(min(len(self.waiting), self._most - len(self._tasks)) if self.open else 0):
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.append(task)
            task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        """Pass on a task's error, or start a task for the questions that came while this one ended."""
        if task.cancelled() or task.exception() is not None:
            self.fail(None if task.cancelled() else task.exception())
        else:
            self._wake()
