"""Figures of scored groups, for the metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from plaudit.types import Finish, Group, Stats


def rollout_figures(groups: Sequence[Group]) -> Stats:
    """Return figures of rewards, their parts, lengths and episodes. Greedy answers count only in reward/failed and
    reward/not_applicable, unless all are greedy. Without any reward, reward/mean and reward/std are absent."""
    answers = [response for group in groups for response in group.responses]
    responses = [response for response in answers if not response.greedy] or answers
    rewards = [response.reward for response in responses if response.reward is not None]
    figures: Stats = {}
    if rewards:
        figures = {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    figures |= {
        "reward/failed": sum(r.score.failed for r in answers) / len(answers),
        "reward/not_applicable": sum(not r.score.applicable for r in answers) / len(answers),
        "length/mean": statistics.fmean(r.completion.length for r in responses),
        "length/max": float(max(r.completion.length for r in responses)),
        "unfinished": sum(not r.finished for r in responses) / len(responses),
    }
    played = [r.completion for r in responses if r.completion.episode is not None]
    if played:
        figures["episode/cut"] = sum(one.finish is Finish.TURNS for one in played) / len(played)
    counts = [one.episode.counts for one in played if one.episode is not None]
    for name in dict.fromkeys(name for one in counts for name in one):
        figures[f"episode/{name}"] = statistics.fmean(one[name] for one in counts if name in one)
    parts = {name for response in responses for name in response.score.parts}
    for name in sorted(parts):
        values = [r.score.parts[name] for r in responses if name in r.score.parts]
        every_finite = all(map(math.isfinite, values))  # `fmean` adds no infinities of both signs
        figures[f"reward/{name}"] = statistics.fmean(values) if every_finite else sum(values) / len(values)
    return figures
