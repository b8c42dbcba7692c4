"""Environments in processes of their own say what they would say here, also when processes are lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import agency
import pytest
from playing import WORLDS, Table, of

from plaudit.environments import workers as environment_workers
from plaudit.environments.agents import player_of, world_of
from plaudit.environments.base import Turn
from plaudit.environments.settings import EnvironmentSettings
from plaudit.environments.workers import TRIES, EnvironmentProcess, EnvironmentWorkers
from plaudit.runtime.plain import dumps, loads
from plaudit.runtime.worker import WorkerLost
from plaudit.support import plugins
from plaudit.support.plugins import load_object
from plaudit.types import Completion, Sampling, Score

AGENCY = str(Path(agency.__file__))
Ends = Callable[..., bool]


class Process:
    """A worker around an `EnvironmentProcess`; what it gets and gives is pickled. `ends`: whether it dies of a call of
    an environment or agent, given as its name and arguments."""

    def __init__(self, number: int, make: Callable[[], EnvironmentProcess], ends: Ends):
        self.name, self.ends, self.process = f"environment {number}", ends, make()
        self.lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        self.heard = list[str]()
        self.most = 0

    async def call(self, method: Any, *arguments: Any) -> Any:
        sent = loads(dumps(arguments))
        await asyncio.sleep(0)
        called, *given = sent[1:] if method is EnvironmentProcess.ask else [method.__name__]
        self.heard.append(called)
        if not self.lost.done() and self.ends(self, called, *given):
            self.die()
        if not self.lost.done():
            work = asyncio.ensure_future(method(self.process, *sent))
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # read
            await asyncio.wait({work, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            self.most = max(self.most, len(self.process._environments))
        if self.lost.done():
            raise self.lost.result()
        return loads(dumps(work.result()))

    def die(self) -> None:
        self.lost.set_result(WorkerLost(self.name, "was killed"))
        for work in self.process._agents.values():
            work.cancel()

    async def gone(self) -> WorkerLost:
        return await asyncio.shield(self.lost)

    def kill(self, reason: str = "was ended") -> None: ...


def never(process: Process, method: str, *arguments: Any) -> bool:
    return False


class Played:
    """Episodes around a table's model, with their environment in this process and in two others."""

    def __init__(self, table: Table, name: str, count: int = 4, ends: Ends = never, **more: Any):
        more = {"function": name if ":" in name else f"{WORLDS}:{name}", "max_tokens": 300, "timeout": 1.0, **more}
        self.settings, self.ends, self.table = EnvironmentSettings(**more), ends, table
        self.plan = [Sampling(seed=seed, max_tokens=40) for seed in range(count)]
        self.lost, self.processes = list[WorkerLost](), list[Process]()

    def here(self) -> list[Completion]:
        world = world_of(self.settings)
        assert world is not None
        return asyncio.run(player_of(self.table.engine, self.table.chats, world).play(self.table.prompt, self.plan))

    def player(self) -> tuple[EnvironmentWorkers, Any]:
        make = EnvironmentProcess.maker(world_of, self.settings, ())

        async def start(number: int) -> Process:
            self.processes.append(Process(number, make, self.ends))
            return self.processes[-1]

        workers = EnvironmentWorkers(start, 2, patience=9.0, failures=self.lost.append)  # type: ignore[arg-type]
        world = world_of(self.settings)
        assert world is not None
        return workers, player_of(self.table.engine, self.table.chats, world, workers)

    def apart(self) -> list[Completion]:
        async def play() -> list[Completion]:
            workers, player = self.player()
            workers.open()
            await workers.ready()
            played = await player.play(self.table.prompt, self.plan)
            left = [(one.process._environments, one.process._agents) for one in self.processes if not one.lost.done()]
            assert not any(environments or agents for environments, agents in left), "what has ended is not kept"
            assert not +workers.episodes
            return played

        return asyncio.run(play())


def plain(answers: list[Completion]) -> list[Any]:
    return [([*one.tokens], [*one.logprobs], one.finish, of(one).earned, of(one).counts) for one in answers]


def killing(at: str, times: int = 1) -> Ends:
    """Let the first `times` processes that are asked for the method die of it."""
    done = list[Process]()

    def ends(process: Process, method: str, *arguments: Any) -> bool:
        if method != at or len(done) == times:
            return False
        done.append(process)
        return True

    return ends


@pytest.mark.parametrize("name", ["Echo", "Waiting", "Letters", "Sums"])
@pytest.mark.parametrize("at", ["", "reset", "step", "score"])
def test_an_environment_says_the_same_in_processes_that_are_lost(name: str, at: str, table: Table) -> None:
    played = Played(table, name, ends=killing(at) if at else never)
    assert plain(played.apart()) == plain(played.here())
    assert len(played.lost) == (1 if at and at in {one for process in played.processes for one in process.heard} else 0)
    assert at or [process.most for process in played.processes] == [2, 2], "episodes are spread evenly"


def test_calls_so_far_are_made_again_in_their_order(table: Table) -> None:
    played = Played(table, "Echo", count=1, ends=killing("step", times=TRIES - 1))
    (one,) = played.apart()
    assert plain([one]) == plain(played.here())
    assert len(played.lost) == TRIES - 1


class Forgets:
    """Says something else each time."""

    said = 0

    def step(self, message: dict[str, Any]) -> str:
        type(self).said += 1
        return f"That is number {self.said}."


def test_an_environment_that_does_not_repeat_itself_fails_its_episode(table: Table) -> None:
    steps = list[str]()

    def ends(process: Process, method: str, *arguments: Any) -> bool:
        steps.append(method)
        return steps.count("step") == 2 and method == "step"

    (one,) = Played(table, f"{__file__}:Forgets", count=1, ends=ends).apart()
    reason = str(of(one).earned.reason)  # type: ignore[union-attr]
    assert "the same calls had another result" in reason and "number 2" in reason and "number 1" in reason


def test_an_environment_that_ends_its_process_fails_and_no_other(table: Table) -> None:
    whole = Played(table, "Echo", count=6).here()
    fatal = of(whole[4]).messages[2]["content"]
    assert sum(one["content"] == fatal for each in whole for one in of(each).messages) == 1

    def ends(process: Process, method: str, *said: Any) -> bool:
        return method == "step" and said[0]["content"] == fatal

    played = Played(table, "Echo", count=6, ends=ends)
    found = played.apart()
    assert plain(found[:4] + found[5:]) == plain(whole[:4] + whole[5:])
    assert of(found[4]).earned == Score(value=None, reason=f"its process was lost {TRIES} times: was killed")
    assert len(played.lost) == TRIES


def test_what_goes_wrong_in_an_environment_is_told_as_here(table: Table) -> None:
    for name, options in (("Endless", {}), ("Broken", {"how": "raises"}), ("Broken", {"how": "hangs"})):
        function = name if name == "Endless" else f"{__file__}:{name}"
        played = Played(table, function, count=2, options=options, timeout=0.2)
        assert plain(played.apart()) == plain(played.here())
        assert not played.lost
    (one,) = Played(table, f"{__file__}:Broken", count=1, options={"how": "locks"}).apart()
    assert "cannot be sent to another process" in str(of(one).earned.reason)  # type: ignore[union-attr]


class Broken:
    def __init__(self, how: str):
        self.how = how

    async def step(self, message: dict[str, Any]) -> Any:
        if self.how == "raises":
            raise KeyError("board")
        if self.how == "hangs":
            await asyncio.sleep(9)
        return Turn(messages=[{"role": "user", "content": "x", "lock": threading.Lock()}])


@pytest.mark.parametrize("at", ["", "start", "finish"])
@pytest.mark.parametrize("name", ["echoes", "waits", "adds", "fails", "endless", "stubborn", "recovers"])
def test_an_agent_does_the_same_in_processes_that_are_lost(name: str, at: str, table: Table) -> None:
    played = Played(table, f"{AGENCY}:{name}", kind="agent", ends=killing(at) if at else never, timeout=60.0)
    assert plain(played.apart()) == plain(played.here())
    assert len(played.lost) == bool(at)


def test_a_silent_agent_fails_and_its_call_is_cancelled(table: Table) -> None:
    (one,) = Played(table, f"{AGENCY}:silent", count=1, kind="agent").apart()
    assert "asked nothing for 1 s" in str(of(one).earned.reason)  # type: ignore[union-attr]


def losing(played: Played, monkeypatch: pytest.MonkeyPatch, *after: int) -> list[Any]:
    """Let the agent's process be lost when the policy has answered so many requests. Return the answers."""
    generate, answered = played.table.engine.generate, list[Any]()

    async def counted(*arguments: Any) -> Any:
        answered.append(await generate(*arguments))
        if len(answered) in after:
            next(one for one in played.processes if not one.lost.done() and one.process._agents).die()
        return answered[-1]

    monkeypatch.setattr(played.table.engine, "generate", counted)
    return answered


def test_a_lost_agent_gets_the_replies_again_that_it_had(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise as many repetitions as `max_turns` are refused, and three losses in a row without a new request."""
    played = Played(table, f"{AGENCY}:echoes", kind="agent", count=1, max_turns=3, timeout=60.0)
    whole = plain(played.here())
    answered = losing(played, monkeypatch, 1, 2, 3)
    assert plain(played.apart()) == whole
    assert len(played.lost) == 3 and len(answered) == 3


def test_an_agent_that_asks_otherwise_after_a_loss_fails(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(table, f"{AGENCY}:drifts", kind="agent", count=1, timeout=60.0)
    losing(played, monkeypatch, 2)
    (one,) = played.apart()
    reason = str(of(one).earned.reason)  # type: ignore[union-attr]
    assert "did not ask 2 of its requests again: let them depend on the row" in reason


def test_settings_that_no_process_reads_are_refused() -> None:
    def said(**more: Any) -> str:
        return " ".join(EnvironmentSettings(**more).contradictions())

    assert "workers are for episodes, and there are none" in said(workers=2)
    assert "workers=0: set workers=1" in said(function="x", resources={"CPU": 1.0})
    assert not said(function="x", workers=2, resources={"CPU": 1.0})


def test_a_process_that_starts_late_makes_the_environment_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def reset(self): return 'first'\n    def step(self, message): return 'go on'\n")
    settings = EnvironmentSettings(function=f"{file}:Mine")
    world_of(settings)
    make = EnvironmentProcess.maker(world_of, settings, ())
    file.write_text("class Mine:\n    def reset(self): return 'later'\n    def step(self, message): return 'go on'\n")
    monkeypatch.setattr(plugins, "_SENT", {})  # as where another process begins

    async def first() -> Any:
        process = make()
        await process.ask(0, "begin")
        return await process.ask(0, "reset", {})

    assert asyncio.run(first()) == ([{"role": "user", "content": "first"}],)


class Slow:
    """Notes what begins, goes on and ends."""

    said: ClassVar[list[str]] = []

    async def reset(self) -> None:
        self.said.append("reset")

    async def step(self, message: dict[str, Any]) -> Turn:
        self.said.append("step")
        try:
            await asyncio.sleep(30)
        finally:
            self.said.append("left")
        return Turn(done=True)

    async def close(self) -> None:
        self.said.append("closed")


@pytest.mark.parametrize("until", ["begin", "step"])
def test_a_cancelled_episode_ends_in_its_process_at_once(until: str, table: Table) -> None:
    """What is under way is cancelled before the environment is closed, and nothing is kept."""
    played = Played(table, f"{__file__}:Slow", count=3, timeout=60.0)

    async def cancelled() -> None:
        workers, player = played.player()
        workers.open()
        await workers.ready()
        loaded: Any = load_object(f"{__file__}:Slow")
        loaded.said.clear()
        playing = asyncio.ensure_future(player.play(table.prompt, played.plan))
        while not any(until in process.heard for process in played.processes):
            await asyncio.sleep(0)
        while until == "step" and loaded.said.count("step") < 3:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(playing, 5)
        if until == "step":
            assert loaded.said[-6:].count("closed") == 3 and loaded.said.count("left") == 3
            assert all(loaded.said.index("left") < place for place, one in enumerate(loaded.said) if one == "closed")
        assert not any(one.process._environments or one.process._tasks for one in played.processes)
        assert not +workers.episodes and not -workers.episodes

    asyncio.run(cancelled())


def test_calls_that_take_long_are_waited_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_workers, "WAIT", 0.0005)
    for name, more in ((f"{WORLDS}:Waiting", {}), (f"{AGENCY}:echoes", {"kind": "agent", "timeout": 60.0})):
        played = Played(table, name, **more)
        assert plain(played.apart()) == plain(played.here())
        assert any("result" in process.heard for process in played.processes)


def test_a_process_that_was_given_up_is_not_answered(table: Table) -> None:
    """It may live on where nothing reaches it: each call of an agent has a key of its own."""
    keys = list[str]()

    def ends(process: Process, method: str, *arguments: Any) -> bool:
        if method == "start":
            keys.append(arguments[1]["api_key"])
        return method == "start" and len(keys) == 1

    played = Played(table, f"{AGENCY}:echoes", kind="agent", count=1, ends=ends, timeout=60.0)
    played.apart()
    assert len(set(keys)) == len(keys) == 2
