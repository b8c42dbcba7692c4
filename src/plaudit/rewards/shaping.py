"""From a raw score to the reward that algorithms see. A group's baseline comes later, from shaped rewards."""

from __future__ import annotations

from plaudit.rewards.settings import ShapingSettings
from plaudit.types import Completion, Finish, Score


def shape(score: Score, completion: Completion, settings: ShapingSettings) -> float | None:
    """(value + shift) * scale, then clipped; an unfinished answer as its setting says; None where there is no score.

    A score that failed stays None even where unfinished answers have a fixed penalty: nothing is known about it.
    """
    if score.value is None:
        return None
    if completion.finish is Finish.LENGTH:
        if settings.unfinished == "mask":
            return None
        if settings.unfinished == "penalty":
            return settings.unfinished_penalty
    reward = (score.value + settings.shift) * settings.scale
    if settings.clip is not None:
        reward = max(-settings.clip, min(settings.clip, reward))
    return reward
