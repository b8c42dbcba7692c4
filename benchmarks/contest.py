"""Contenders taking turns on the same cores, and what they say of it.

start all, warm up -> [a segment of ours, of the first peer's, of the second's] x repeats -> all finish
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

POLL = 0.02
"""Seconds between two looks at the files of a process that knows no gate."""


class ContenderError(RuntimeError):
    """A contender refused, ended, or went silent, before it had done its part."""


@dataclass
class Result:
    """What one contender did on one line."""

    first_step: float = 0.0
    """Seconds from the process's start to the end of its first step, others starting beside it."""
    rates: list[float] = field(default_factory=list)
    """Tokens a second of each measured segment."""
    costs: list[float] = field(default_factory=list)
    """CPU-seconds per 1,000 tokens of each: what other programs on the machine disturb least."""
    step_tokens: list[float] = field(default_factory=list)
    """Tokens of a step, on average, of each measured segment."""
    peak_mib: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cost(self) -> float:
        return statistics.median(self.costs)

    @property
    def tokens_per_step(self) -> float:
        return statistics.fmean(self.step_tokens)

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Contender:
    """A process behind a gate (`gate.py`): every message is awaited with a deadline."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, deadline: float):
        self.deadline, self.log = deadline, os.path.relpath(log)
        self.result = Result()
        self.profile: dict[str, Any] | None = None
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._started = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"event"'):  # libraries may print while they are imported, before the gate is there
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def hear(self, event: str) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=self.deadline)
        except queue.Empty:
            raise ContenderError(f"no answer for {self.deadline:.0f} s; its output is in {self.log}") from None
        if message is not None and message["event"] == "refused":
            raise ContenderError(message["reason"])
        if message is None or message["event"] != event:
            raise ContenderError(f"it ended early; its output is in {self.log}")
        return message

    def go(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(f"it ended early; its output is in {self.log}") from None

    def warm_up(self) -> None:
        """Hear of the first step, and of the first segment, which is not measured."""
        self.hear("first_step")
        self.result.first_step = time.perf_counter() - self._started
        self.hear("segment")

    def measure(self, steps: int) -> None:
        """Let it run one segment, to the end."""
        self.go()
        message = self.hear("segment")
        self.result.rates.append(message["tokens"] / message["seconds"])
        self.result.costs.append(1000 * message["cpu"] / message["tokens"])
        self.result.step_tokens.append(message["tokens"] / steps)

    def finish(self) -> Result:
        """Let it do whatever a run does at its end, and hear its figures."""
        self.go()
        message = self.hear("done")
        self.result.peak_mib = message["peak_mib"]
        self.result.figures, self.result.versions = message["figures"], message["versions"]
        self.result.tokens = message.get("tokens", [])
        self.profile = message.get("profile")
        self._process.wait(timeout=self.deadline)
        return self.result

    def stop(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


Entry = Callable[[], Contender] | str
"""How to start a contender, or why there is none."""


def contest(entries: Sequence[Entry], *, steps: Sequence[int], repeats: int) -> list[Result | str]:
    """Let contenders take turns: a result each, or why there is none. One that fails does not end the others.

    `steps`: of a segment of each. All start at once; only their warm-ups overlap.
    """
    outcome: list[Result | str] = [entry if isinstance(entry, str) else "" for entry in entries]
    running: dict[int, Contender] = {}

    def attempt(number: int, act: Callable[[Contender], Result | None]) -> None:
        try:
            outcome[number] = act(running[number]) or ""
        except ContenderError as error:
            outcome[number] = str(error)
            running.pop(number).stop()

    try:
        for number, entry in enumerate(entries):
            if not isinstance(entry, str):
                running[number] = entry()
        for number in list(running):
            attempt(number, Contender.warm_up)
        for _ in range(repeats):
            for number in list(running):
                attempt(number, partial(Contender.measure, steps=steps[number]))
        for number in list(running):
            attempt(number, Contender.finish)
    finally:
        for contender in running.values():
            contender.stop()
    return outcome


def watched(
    command: Sequence[str], environment: Mapping[str, str], log: Path, look: Callable[[float], bool], limit: float
) -> str:
    """Run a process that knows no gate until `look` at its files, with the seconds since its start, is content.

    Return "", or why it was not: the process ended, or the limit of seconds was over. It runs no longer.
    """
    began = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        while time.perf_counter() - began < limit:
            over = process.poll() is not None
            if look(time.perf_counter() - began):
                return ""
            if over:
                return f"it ended (status {process.returncode}) before the mark; its output is in {log}"
            time.sleep(POLL)
        return f"it did not pass the mark in {limit:.0f} s"
    finally:
        process.kill()
        process.wait()
