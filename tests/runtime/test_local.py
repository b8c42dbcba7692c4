"""The in-process worker group, and coroutines from plain code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plaudit.runtime.coroutines import finished, together
from plaudit.runtime.local import LocalWorkerGroup


class Numbers:
    """Stands for a batch: units that can be spread over ranks."""

    def __init__(self, *numbers: int):
        self.numbers = numbers

    def shards(self, world: int) -> list[Numbers]:
        return [Numbers(*self.numbers[rank::world]) for rank in range(world)]


class Adder:
    def __init__(self) -> None:
        self.total = 0

    def add(self, batch: Numbers, times: int) -> int:
        if times < 0:
            raise ArithmeticError("times must not be negative")
        self.total += times * sum(batch.numbers)
        return self.total


def test_a_group_of_one_answers_like_its_worker() -> None:
    worker_group = LocalWorkerGroup(Adder())
    assert worker_group.world == 1
    assert asyncio.run(worker_group.split(Adder.add, Numbers(1, 2, 3), 2)) == [12]
    assert asyncio.run(worker_group.each(Adder.add, Numbers(1), 1)) == [13]


class Desk:
    """A worker with two parts."""

    def __init__(self) -> None:
        self.adders = {"left": Adder(), "right": Adder()}
        self.said: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[Adder]:
        try:
            yield self.adders[name]
        except ArithmeticError:
            self.said.append(name)
            raise


def test_a_part_of_a_group_is_one_too() -> None:
    worker_group = LocalWorkerGroup(desk := Desk())
    left, right = worker_group.part(Adder, "left"), worker_group.part(Adder, "right")
    assert asyncio.run(left.split(Adder.add, Numbers(1, 2, 3), 2)) == [12]
    assert asyncio.run(right.each(Adder.add, Numbers(1), 1)) == [1]
    assert (left.world, worker_group.name, desk.adders["left"].total) == (1, None, 12)
    with pytest.raises(ArithmeticError):
        asyncio.run(right.each(Adder.add, Numbers(1), -1))
    assert desk.said == ["right"], "the worker sees its parts' errors"


TYPED = """
from plaudit.runtime.worker_group import WorkerGroup
from plaudit.runtime.worker import Worker

class Batch:
    def shards(self, world: int) -> list["Batch"]: return []

class Reader:
    def read(self, batch: Batch) -> int: return 1

class Writer(Reader):
    def write(self, batch: Batch, times: int) -> str: return ""
    async def wait(self, seconds: float) -> bytes: return b""

async def calls(writers: WorkerGroup[Writer], readers: WorkerGroup[Reader], worker: Worker[Writer]) -> None:
    {call}
"""
GOOD = (
    "found: list[str] = await writers.split(Writer.write, Batch(), 1)",
    "found: list[int] = await writers.each(Reader.read, Batch())",
    "found: bytes = await worker.call(Writer.wait, 1.0)",
    "found: int = await worker.call(Writer.read, Batch())",
)
BAD = {
    "await writers.split(Writer.rite, Batch(), 1)": "rite",
    "await writers.split(Writer.write, Batch(), 'one')": "split",
    "await writers.split(Writer.write, Batch())": "split",
    "await writers.each(Writer.write, 3, 1)": "each",
    "await readers.split(Writer.write, Batch(), 1)": "split",
    "found: list[int] = await writers.split(Writer.write, Batch(), 1)": "split",
    "await worker.call(Writer.wait, 'long')": "call",
    "await worker.call('wait', 1.0)": "call",
}


@pytest.mark.slow
def test_the_type_checker_refuses_what_no_worker_has_and_wrong_arguments(tmp_path: Path) -> None:
    calls = [*GOOD, *BAD]
    for number, call in enumerate(calls):
        (tmp_path / f"call{number}.py").write_text(TYPED.format(call=call))
    config = Path(__file__).parents[2] / "pyproject.toml"
    files = [str(tmp_path / f"call{number}.py") for number in range(len(calls))]
    files += [str(config.parent / "src/plaudit/runtime" / name) for name in ("worker_group.py", "worker.py")]
    options = ["--follow-imports", "skip", "--cache-dir", str(tmp_path)]  # all other files take minutes
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), *options, *files]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=config.parent).stdout
    for number, call in enumerate(calls):
        errors = [line for line in told.splitlines() if f"call{number}.py:" in line and "error:" in line]
        assert bool(errors) == (call in BAD), (call, told)
        assert call in GOOD or any(BAD[call] in line for line in errors), (call, errors)


def test_the_workers_own_exception_reaches_the_caller() -> None:
    worker_group = LocalWorkerGroup(Adder())
    with pytest.raises(ArithmeticError, match="negative"):
        asyncio.run(worker_group.split(Adder.add, Numbers(1), -1))


async def where(fail: bool = False) -> threading.Thread:
    await asyncio.sleep(0)
    if fail:
        raise ArithmeticError("no")
    return threading.current_thread()


def test_work_is_finished_here_or_beside_a_running_loop() -> None:
    async def cell() -> threading.Thread:
        return finished(where())

    assert finished(where()) is threading.current_thread()
    assert asyncio.run(cell()) is not threading.current_thread()


def test_errors_come_out_of_both() -> None:
    async def cell() -> threading.Thread:
        return finished(where(fail=True))

    for work in (lambda: finished(where(fail=True)), lambda: asyncio.run(cell())):
        with pytest.raises(ArithmeticError):
            work()


async def idle() -> None:
    await asyncio.sleep(60)


async def busy() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("work", [idle, busy])
def test_an_interrupt_beside_a_running_loop_ends_the_work(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A second Ctrl-C in a notebook: the run went on behind the user's back, with its folder free for another."""
    seen: list[str] = []

    async def noted() -> None:
        try:
            await work()
        finally:
            seen.append("ended")

    async def cell() -> None:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not asyncio's own
        threads = set(threading.enumerate())
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                finished(noted())
        finally:
            signal.signal(signal.SIGINT, before)
            timer.join()
        assert seen == ["ended"]
        assert not {thread for thread in threading.enumerate() if thread.is_alive()} - threads

    began = time.monotonic()
    asyncio.run(cell())
    assert time.monotonic() - began < 10


def test_several_at_once_give_their_results_in_order_or_the_first_failure_itself() -> None:
    ended: list[str] = []

    async def one(name: str, seconds: float, fails: bool = False) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)
        if fails:
            raise ArithmeticError(name)
        return name

    assert finished(together([one("slow", 0.02), one("fast", 0.0)])) == ["slow", "fast"]
    assert ended == ["fast", "slow"]
    with pytest.raises(ArithmeticError, match="first"):
        finished(together([one("long", 60.0), one("first", 0.0, fails=True), one("second", 0.05, fails=True)]))
    assert sorted(ended[2:]) == ["first", "long", "second"], "the others are cancelled, and have ended"
