"""Environments for tests."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from plaudit.environments.base import Turn


class Echo:
    """Says back how long each answer was, three times; the reward is the number of letters of all."""

    def __init__(self, turns: int = 3):
        self.turns, self.lengths = turns, list[int]()

    def step(self, message: dict[str, Any]) -> Turn:
        self.lengths.append(len(message["content"]))
        if len(self.lengths) == self.turns:
            return Turn(done=True, parts={"turns": float(len(self.lengths))})
        return Turn(messages=[{"role": "user", "content": f"{self.lengths[-1]} letters"}])

    def get_reward(self) -> float:
        return sum(self.lengths) / 100


class Waiting(Echo):
    """As Echo, async, with a question of its own."""

    async def reset(self, **row: Any) -> str:
        await asyncio.sleep(0)
        return f"Begin with {sorted(row)[0]}."

    async def step(self, message: dict[str, Any]) -> Turn:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(message)


class Letters(Echo):
    """As Echo. The reward prefers some letter, by the row."""

    def reset(self, seed: int, prompt: str) -> None:
        self._wanted = "aeinorst"[(seed + len(prompt)) % 8]
        self._said = ""

    def step(self, message: dict[str, Any]) -> Turn:
        self._said += str(message["content"])
        return super().step(message)

    def get_reward(self) -> float:
        return self._said.count(self._wanted) / (1 + len(self._said))


class Endless:
    def step(self, message: dict[str, Any]) -> str:
        return "again"


class Sometimes(Echo):
    """Fails in the first episode, as `how` says."""

    made = 0

    def __init__(self, how: str):
        super().__init__()
        self.how = how if type(self).made == 1 else ""  # 0 is the run's own look at it
        type(self).made += 1

    def step(self, message: dict[str, Any]) -> Any:
        if self.how == "raises":
            raise KeyError("board")
        if self.how == "hangs":
            time.sleep(5)
        return {"returns": 3, "is silent": Turn()}.get(self.how) or super().step(message)


class Listener:
    """Says which turn it heard; the third ends the episode."""

    def __init__(self) -> None:
        self.heard = 0

    def step(self, message: dict[str, Any]) -> Turn:
        self.heard += 1
        if self.heard == 3:
            return Turn(done=True, reward=1.0)
        return Turn(messages=[{"role": "user", "content": f"{self.heard - 1} said."}])


class Tells:
    def step(self, message: dict[str, Any]) -> Turn:
        return Turn(messages=[{"role": "tool", "content": "A result."}])


class Sums:
    """A tool that adds; the reward is the sum of all results."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self._sum += a + b
        return a + b

    async def wait(self) -> str:
        """Wait for long."""
        await asyncio.sleep(30)
        return "never"

    def get_reward(self) -> float:
        return self._sum


class Nothing:
    """Neither steps nor tools."""


def untold(a, b):  # type: ignore[no-untyped-def]
    return a


class Closes(Echo):
    """Notes that it was closed; its third episode fails."""

    closed: ClassVar[list[int]] = []

    def step(self, message: dict[str, Any]) -> Turn:
        if len(self.closed) == 2:
            raise KeyError("board")
        return super().step(message)

    async def close(self) -> None:
        self.closed.append(len(self.lengths))
        raise RuntimeError("too late to matter")
