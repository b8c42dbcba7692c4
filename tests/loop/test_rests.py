"""The time in which no prompt is being answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plaudit.loop.rests import Rests

ANY: Any = None


class Slow:
    """Rollouts of some seconds; a negative number fails."""

    async def rollout(self, index: float, prompt: Any) -> Any:
        await asyncio.sleep(abs(index))
        if index < 0:
            raise ValueError("lost")
        return index


def test_only_the_time_without_any_rollout_counts() -> None:
    async def steps() -> list[float]:
        rests, found = Rests(Slow()), []  # type: ignore[arg-type]
        await asyncio.sleep(0.1)  # before the first rollout nobody could have answered
        await asyncio.gather(rests.rollout(0, ANY), rests.rollout(0.05, ANY))  # type: ignore[arg-type]
        found.append((await rests(ANY))["time/rollout_idle"])
        await asyncio.sleep(0.1)
        found.append((await rests(ANY))["time/rollout_idle"])
        long = asyncio.create_task(rests.rollout(0.1, ANY))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        found.append((await rests(ANY))["time/rollout_idle"])
        await long
        return [float(value) for value in found]

    first, second, third = asyncio.run(steps())
    assert first < 0.05 and third < 0.05
    assert second >= 0.09


def test_a_failed_rollout_ends_too() -> None:
    async def steps() -> float:
        rests = Rests(Slow())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lost"):
            await rests.rollout(-0.01, ANY)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        return float((await rests(ANY))["time/rollout_idle"])

    assert asyncio.run(steps()) >= 0.04
