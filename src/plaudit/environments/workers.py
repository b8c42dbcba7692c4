"""Environments and agents in worker processes: each episode's is in one of them, and is made again if that one is lost.

    begin -> the process with the fewest environments -> a call at a time -> what the environment says
    the process is lost -> another one -> all calls so far again -> if it says the same, the episode goes on

Left out: an agent's requests (`agents.py`), and the start of processes (`executors/scoring.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from plaudit.environments.base import Environment, EpisodeError, LostError, Message, Turn, explained
from plaudit.environments.settings import EnvironmentSettings
from plaudit.rewards.functions import as_score
from plaudit.runtime.plain import dumps, plain
from plaudit.runtime.supervisor import Place, Start, Supervisor
from plaudit.runtime.worker import WorkerLost
from plaudit.support.plugins import load_plugins, run_as_sent, sources
from plaudit.types import Score

Result = TypeVar("Result")
TRIES = 3
"""An episode fails once this many processes were lost during one of its calls, or while its agent asked nothing new."""
AT_ONCE = 256
"""Most agents at once in a process."""
WAIT = 10.0
"""Most seconds that a process waits for a result before it is asked again, far below the time-out of a call to it."""
NONE = (
    "no process of the environment became ready within {patience:g} s, which is twice runtime.start_timeout: free what "
    "environment.resources reserve, or raise runtime.start_timeout"
)


class EnvironmentProcess:
    """The environments of several episodes, or an agent's calls, in a process of their own."""

    def __init__(
        self,
        world_of: Callable[[EnvironmentSettings], Any],
        settings: EnvironmentSettings,
        plugins: Sequence[str],
        sources: Mapping[str, bytes],
    ):
        """`world_of` returns a World, or Agents. `sources`: the user's files as the run has loaded them, since they may
        be edited while it lasts."""
        run_as_sent(sources)
        load_plugins(plugins)
        self._world = world_of(settings)
        self._environments, self._agents = dict[int, Environment](), dict[int, asyncio.Future[Any]]()
        self._tasks = dict[int, asyncio.Task[Any]]()

    @classmethod
    def maker(
        cls, world_of: Callable[[EnvironmentSettings], Any], settings: EnvironmentSettings, plugins: Sequence[str]
    ) -> Callable[[], EnvironmentProcess]:
        """Return a picklable factory of such processes' objects, with the user's files as this process loaded them."""
        return partial(cls, world_of, settings, tuple(plugins), sources())

    @plain
    async def ask(self, episode: int, method: str, *arguments: Any) -> tuple[Any] | None:
        """Begin a call of the episode's environment or agent, of which it has one at a time, and return as `result`."""
        self._tasks[episode] = asyncio.ensure_future(self._asked(episode, method, *arguments))
        return await self.result(episode)

    @plain
    async def result(self, episode: int) -> tuple[Any] | None:
        """Return what the call returned; None if it has not ended within WAIT. Raises EpisodeError."""
        task = self._tasks[episode]
        if not (await asyncio.wait({task}, timeout=WAIT))[0]:
            return None
        if task.cancelled():
            raise EpisodeError("it was cancelled")
        return (task.result(),)

    async def _asked(self, episode: int, method: str, *arguments: Any) -> Any:
        found: Any = None
        match method:
            case "begin":
                self._environments[episode] = await self._world.begin()
            case "start":
                self._agents[episode] = await self._world.start(*arguments)
            case "finish":
                try:
                    return as_score(await self._agents[episode])
                except (Exception, SystemExit) as error:
                    raise EpisodeError(explained(error)) from error
            case _:
                found = await getattr(self._environments[episode], method)(*arguments)
        try:
            dumps(found)
        except Exception as error:
            raise EpisodeError(f"{method} returned what cannot be sent to another process: {error}") from error
        return found

    @plain
    async def end(self, episode: int) -> None:
        """Cancel the episode's call, if one is under way, and close its environment or cancel its agent."""
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()
            await asyncio.wait({task})
            task.cancelled() or task.exception()  # read, or asyncio would log it
        if (work := self._agents.pop(episode, None)) is not None:
            work.cancel()
        if (environment := self._environments.pop(episode, None)) is not None:
            await environment.close()


class EnvironmentWorkers:
    """Gives each episode an environment, or an agent, in an `EnvironmentProcess`. An environment repeats itself if what
    it says depends on its row, with the seed, and its calls alone."""

    def __init__(
        self,
        start: Start[EnvironmentProcess],
        count: int,
        *,
        patience: float,
        failures: Callable[[WorkerLost], None],
        say: Callable[[str], None] = lambda text: None,
    ):
        """The arguments are as in `JudgeWorkers`."""
        more: Any = {"patience": patience, "failures": failures, "say": say}
        self._supervisor = Supervisor(start, count, work="episodes", none=NONE, **more)
        self.numbers, self.episodes = itertools.count(), Counter[int]()
        """Numbers for episodes, and how many of these each place has."""
        self._alone, self._agents = asyncio.Lock(), asyncio.Semaphore(AT_ONCE * count)

    def open(self) -> None:
        """Begin to start workers, within a running event loop."""
        self._supervisor.open()

    async def ready(self) -> None:
        """Wait until all workers have loaded the environment. Raises the error that prevents it."""
        await self._supervisor.counted()

    async def begin(self) -> DistantEnvironment:
        """Return a new episode's environment. Raises EpisodeError if it cannot be made."""
        environment = DistantEnvironment(self)
        try:
            await environment.asked("begin")
        except BaseException:
            await environment.close()
            raise
        return environment

    @contextlib.asynccontextmanager
    async def agent(self, row: Mapping[str, Any], about: Mapping[str, str]) -> AsyncIterator[asyncio.Future[Any]]:
        """Give an agent's call, which has begun. It raises LostError if its process is lost."""
        async with self._agents:
            process = await self.chosen()
            try:
                await process.asked("start", row, about)
                yield asyncio.ensure_future(process.asked("finish"))
            finally:
                await process.leave()

    async def chosen(self) -> EpisodeProcess:
        """Return the process with the fewest episodes, for another one."""
        place = min(await self._supervisor.free(), key=lambda one: self.episodes[one.number])
        return EpisodeProcess(self, place)

    async def sent(self, place: Place[EnvironmentProcess], method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the place's process. Raises LostError if that is lost."""
        try:
            return await self._supervisor.call(place, 1, lambda worker: worker.call(method, *arguments))
        except WorkerLost as lost:
            raise LostError(lost.reason) from lost

    async def repeated(self, attempt: Callable[[], Awaitable[Result]], progress: Callable[[], int]) -> Result:
        """Return what an agent's attempt returns, which is made again when a process is lost. Raises EpisodeError after
        TRIES without `progress`, which grows with what the agent does."""
        tries, before = 0, -1
        while True:
            try:
                return await attempt()
            except LostError as error:
                tries, before = 1 if progress() > before else tries + 1, progress()
                if tries == TRIES:
                    raise EpisodeError(f"its process was lost {TRIES} times: {error}") from error

    async def call(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Return what a call returns, which is made again when a process is lost: the last time while no other one is
        made a last time, since what ends its process ends others' calls too. Raises EpisodeError after TRIES."""
        for number in range(TRIES):
            async with self._alone if number == TRIES - 1 else contextlib.nullcontext():
                try:
                    return await attempt()
                except LostError as error:
                    lost = error
        raise EpisodeError(f"its process was lost {TRIES} times: {lost}")

    def close(self) -> None:
        self._supervisor.close("the processes of the environment were")


class EpisodeProcess:
    """The process of an episode's environment or agent, which has a number there."""

    def __init__(self, workers: EnvironmentWorkers, place: Place[EnvironmentProcess]):
        self._workers, self._place, self._worker = workers, place, place.worker
        self._number = next(workers.numbers)
        workers.episodes[place.number] += 1

    @property
    def lost(self) -> bool:
        return self._place.worker is not self._worker

    async def asked(self, method: str, *arguments: Any) -> Any:
        """Return what a call of the episode's environment or agent returns. Raises LostError, or what the call does."""
        found = await self._sent(EnvironmentProcess.ask, method, *arguments)
        while found is None:
            found = await self._sent(EnvironmentProcess.result)
        return found[0]

    async def leave(self) -> None:
        """Let the process, if it is not lost, end what it has of the episode."""
        self._workers.episodes[self._place.number] -= 1
        with contextlib.suppress(LostError):
            await self._sent(EnvironmentProcess.end)

    async def _sent(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.lost:
            raise LostError("it was lost between two calls")
        return await self._workers.sent(self._place, method, self._number, *arguments)


class DistantEnvironment:
    """An episode's environment in another process; its methods are those of `Environment`."""

    def __init__(self, workers: EnvironmentWorkers):
        self._workers = workers
        self._calls, self._found = list[tuple[Any, ...]](), list[str]()
        self._process: EpisodeProcess | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        found: list[Message] = await self.asked("reset", row)
        return found

    async def step(self, message: Message) -> Turn:
        turn: Turn = await self.asked("step", message)
        return turn

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Turn, bool]:
        found: tuple[Turn, bool] = await self.asked("call", name, arguments)
        return found

    async def score(self) -> Score:
        score: Score = await self.asked("score")
        return score

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.leave()

    async def asked(self, method: str, *arguments: Any) -> Any:
        """Return what the environment's method returns, called in its process or, if that is lost, in another one."""
        self._calls.append((method, *arguments))
        found = await self._workers.call(self._last)
        self._found.append(repr(found))
        return found

    async def _last(self) -> Any:
        """Make the last call; in a process that does not know the environment, all calls. Raises EpisodeError if an
        earlier one has another result now."""
        if self._process is None or self._process.lost:
            await self.close()
            self._process = await self._workers.chosen()
            for call, before in zip(self._calls, self._found, strict=False):
                if (found := repr(await self._process.asked(*call))) != before:
                    raise EpisodeError(
                        f"its process was lost, and in another one the same calls had another result, {found:.80} and "
                        f"not {before:.80}: let it depend on the row and on `seed` alone"
                    )
        return await self._process.asked(*self._calls[-1])


Playing = Environment | DistantEnvironment
"""An episode's environment, in this process or in another one."""
