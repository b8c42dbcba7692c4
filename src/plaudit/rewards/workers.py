"""Judges and functions in worker processes: calls are spread over the live workers, and a lost worker is replaced.

    sequences -> a share for each worker -> `of_sequences` in the worker -> scores in order
    answers -> queue -> what waits, to a free worker -> `scores` in the worker -> a score each
    a worker is lost -> another worker gets its share; if none is left, the share waits

A score depends only on its answer, so it does not matter which worker is asked, in which batch, or how often.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from plaudit.rewards.judge import Tokens
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.runtime.coroutines import together
from plaudit.runtime.plain import plain
from plaudit.runtime.queue import Queue
from plaudit.runtime.supervisor import Place, Start, Supervisor
from plaudit.runtime.worker import Worker, WorkerLost
from plaudit.support.plugins import load_plugins, run_as_sent, sources
from plaudit.types import Completion, Prompt, Score
from plaudit.types.distant import Distant, Source, values

Asked = tuple[Prompt, Completion]
CALL = 3000.0
"""Most seconds of all deadlines in one call together, below the time-out of a call to a worker."""
CALLS = 32
"""Calls to a worker at the same time, if its function waits for something."""
TRIES = 3
"""An answer gets no score once this many workers were lost while they scored it."""
NONE = (
    "no {} became ready within {{patience:g}} s, which is twice runtime.start_timeout: free what the reward's "
    "`resources` reserve, or raise runtime.start_timeout"
)


class Scores(Protocol):
    """A judge as its worker processes offer it; `of_sequences` and `of_distant` return one score per sequence."""

    @plain
    def of_sequences(self, sequences: list[Tokens]) -> list[float]: ...

    def of_distant(self, sequences: list[Tokens]) -> list[float]: ...

    def pin(self, sources: Sequence[Source]) -> list[int]:
        """Fetch the answers of these sources, for `of_distant`. Return the indices of the sources that are lost."""
        ...


class JudgeWorkers:
    """The `score_batch` of a JudgeReward. Workers start at `open` or the first call, and keep running."""

    def __init__(
        self,
        start: Start[Scores],
        count: int,
        *,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """If no worker is left, calls wait at most `patience` seconds. `failures` is called with every lost worker and
        may raise, which ends the run."""
        more: Any = {"patience": patience, "failures": failures, "say": say}
        self._supervisor = Supervisor(start, count, work="questions", none=NONE.format("judge"), **more)

    def open(self) -> None:
        """Begin to start workers, within a running event loop. Further calls do nothing."""
        self._supervisor.open()

    async def __call__(self, sequences: list[Tokens]) -> list[float | None]:
        """Return a score for each sequence, in order; None for one whose tokens are lost with a node."""
        self.open()
        places = (await self._supervisor.free(all_tried=True))[: len(sequences)]
        shares = [sequences[number :: len(places)] for number in range(len(places))]
        found = await asyncio.gather(*(self._asked(place, mine) for place, mine in zip(places, shares, strict=True)))
        scores: list[float | None] = [None] * len(sequences)
        for number, share in enumerate(found):
            scores[number :: len(places)] = share
        return scores

    async def _asked(self, place: Place[Scores], sequences: list[Tokens]) -> Sequence[float | None]:
        """Return scores from the worker in `place` or, if that worker is lost, from another one."""
        far = any(isinstance(sequence, Distant) for sequence in sequences)

        async def ask(judge: Worker[Scores]) -> Sequence[float | None]:
            return await (_of_distant(judge, sequences) if far else judge.call(Scores.of_sequences, sequences))

        scores = await self._supervisor.asked(len(sequences), ask, first=place)
        if len(scores) != len(sequences):
            raise ValueError(f"A judge was asked about {len(sequences)} and scored {len(scores)} sequences.")
        return scores

    def close(self) -> None:
        self._supervisor.close("the judges were")


async def _of_distant(judge: Worker[Scores], sequences: Sequence[Tokens]) -> list[float | None]:
    """Score sequences; None for lost ones. All processes fetch tokens first: during a pass they wait for each other."""
    of = [sequence.source if isinstance(sequence, Distant) else None for sequence in sequences]
    sources = [source for source in {id(source): source for source in of}.values() if source is not None]
    found = await together(process.call(Scores.pin, sources) for process in judge.processes)
    lost = {id(sources[which]) for own in found for which in own}
    there = [sequence for sequence, source in zip(sequences, of, strict=True) if id(source) not in lost]
    scores = iter(await judge.call(Scores.of_distant, there) if there else ())
    return [None if id(source) in lost else next(scores) for source in of]


class FunctionProcess:
    """A function, a rule or a sandbox in a process of its own."""

    def __init__(self, settings: RewardSettings, plugins: Sequence[str], sources: Mapping[str, bytes]):
        """`sources`: the user's files as the run has loaded them, since they may be edited while it lasts."""
        run_as_sent(sources)
        load_plugins(plugins)
        self.reward = function_reward(settings)

    @classmethod
    def maker(cls, settings: RewardSettings, plugins: Sequence[str]) -> Callable[[], FunctionProcess]:
        """Return a picklable factory of such processes' objects, with the user's files as this process loaded them."""
        return partial(cls, settings, tuple(plugins), sources())

    @plain
    async def scores(self, asked: Sequence[Asked]) -> list[Score]:
        found = await asyncio.gather(*(self.reward.score(prompt, [completion]) for prompt, completion in asked))
        return [score for (score,) in found]


@dataclass(eq=False, slots=True)
class _Answer:
    prompt: Prompt
    completion: Completion


class FunctionWorkers:
    """A `Reward` whose function is called in `FunctionProcess`es.

    A worker whose function computes has one call at a time. If it is lost, each answer of the call is scored again by
    itself, so that only an answer that ends its process every time fails.
    """

    def __init__(
        self,
        start: Start[FunctionProcess],
        count: int,
        *,
        waits: bool,
        tokens: bool,
        deadline: float,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """`waits`: the function waits (for a network), so that a worker gets many calls at once. `tokens`: it reads an
        answer's tokens. `deadline`: seconds for one answer. The rest is as in `JudgeWorkers`."""
        more: Any = {"patience": patience, "failures": failures, "say": say}
        self._supervisor = Supervisor(
            start, count, work="answers", none=NONE.format("process of a reward function"), **more
        )
        self._count, self._waits, self._tokens = count, waits, tokens
        self._most = max(1, int(CALL / deadline))
        self._queue: Queue[_Answer, Score] = Queue(self._work, tasks=count * (CALLS if waits else 1))
        self._again = asyncio.Lock()

    def open(self) -> None:
        """Begin to start workers, within a running event loop."""
        self._supervisor.open()

    async def ready(self) -> None:
        """Wait until all workers have loaded the function. Raises the error that prevents it."""
        await self._supervisor.counted()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        bodies = values([one.tokens for one in completions]) if self._tokens else [()] * len(completions)
        lean = [  # no function is given log-probs or versions
            replace(one, tokens=body, logprobs=(), versions=()) for one, body in zip(completions, bodies, strict=True)
        ]
        return await self._queue.ask([_Answer(prompt, completion) for completion in lean])

    async def _work(self) -> None:
        """Takes: waiting answers, a worker's share at a time. Waits for: a free worker and its reply. Gives: scores."""
        while self._queue.open:
            answers = self._queue.take(min(self._most, math.ceil(len(self._queue.waiting) / self._count)))
            for answer, score in zip(answers, await self._scored(answers) if answers else (), strict=True):
                self._queue.answer(answer, score)

    async def _scored(self, answers: Sequence[_Answer]) -> list[Score]:
        ask = partial(_scores, answers)
        if self._waits:
            return await self._supervisor.asked(len(answers), ask)
        try:
            return await self._supervisor.once(len(answers), ask)
        except WorkerLost as lost:
            return [await self._by_itself(answer, lost) for answer in answers]

    async def _by_itself(self, answer: _Answer, lost: WorkerLost) -> Score:
        async with self._again:  # one at a time: an answer that ends the process would end others' calls too
            for _ in range(TRIES - 1):
                try:
                    (score,) = await self._supervisor.once(1, partial(_scores, [answer]))
                    return score
                except WorkerLost as again:
                    lost = again
        return Score(value=None, reason=f"its process was lost {TRIES} times while it was scored: {lost.reason}")

    def close(self) -> None:
        self._supervisor.close("the processes of a reward function were")


async def _scores(answers: Sequence[_Answer], worker: Worker[FunctionProcess]) -> list[Score]:
    return await worker.call(FunctionProcess.scores, [(one.prompt, one.completion) for one in answers])
