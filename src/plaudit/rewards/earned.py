"""The reward that an environment gave to an episode.

episode -> what it earned, as a Score
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.types import Completion, Prompt, Score


def unless_failed(completions: Sequence[Completion], scores: Sequence[Score]) -> list[Score]:
    """Return the scores by a reward; an episode whose environment failed has failed, whatever the reward says."""
    pairs = zip(completions, scores, strict=True)
    return [(one.episode and one.episode.failure) or score for one, score in pairs]


class EarnedReward:
    """Returns each episode's own score. An answer of a run without an environment fails, as it earned nothing."""

    reads_tokens = waits = False

    def __init__(self, name: str = ""):
        self.name = name or "environment"

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        nothing = Score(value=None, reason="there is no environment: set environment.function")
        return [nothing if one.episode is None else one.episode.earned or nothing for one in completions]
