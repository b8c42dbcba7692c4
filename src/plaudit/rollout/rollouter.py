"""From a prompt to a scored group: the engine answers, the reward judges.

Prompt -> engine.generate (the whole plan at once) -> reward.score -> shape -> Group
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from plaudit.rewards.base import Reward
from plaudit.rewards.settings import ShapingSettings
from plaudit.rewards.shaping import shape
from plaudit.rollout.engine import Engine
from plaudit.types import Completion, Group, Prompt, Response, Sampling, Score, Stats


class Groups(Protocol):
    """Where groups come from: sampled now, or read from a record."""

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        """The scored group of the run's `index`-th prompt."""
        ...


class Rollouter:
    """Answers prompts by `plan`, one Sampling a response. Stateless: a lost rollout may simply be run again."""

    def __init__(
        self, engine: Engine, reward: Reward, shaping: ShapingSettings, plan: Sequence[Sampling], *, seed: int
    ):
        self.engine, self.reward, self.shaping = engine, reward, shaping
        self.plan, self.seed = tuple(plan), seed

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        """The scored group of the run's `index`-th prompt: its samples depend on (seed, index) and weights alone."""
        plan = [replace(s, seed=completion_seed(self.seed, index, k)) for k, s in enumerate(self.plan)]
        completions = await self.engine.generate(prompt.tokens, plan)
        scores = await self.reward.score(prompt, completions)
        assert len(scores) == len(completions), (len(scores), len(completions))
        responses = [self._response(*each) for each in zip(completions, scores, plan, strict=True)]
        return Group(index=index, prompt=prompt, responses=tuple(responses))

    def _response(self, completion: Completion, score: Score, sampling: Sampling) -> Response:
        return Response(
            completion=completion,
            trainable=(True,) * len(completion.tokens),
            score=score,
            reward=shape(score, completion, self.shaping),
            greedy=sampling.temperature == 0,
        )


def completion_seed(seed: int, index: int, sample: int) -> int:
    """Seed of one completion, a 63-bit hash: neighbours share nothing."""
    digest = hashlib.blake2b(f"{seed}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rollout_figures(groups: Sequence[Group]) -> Stats:
    """Rewards (and each part of them) and lengths of a step's samples, for the metrics; failures of greedy answers
    too. Where no sample has a reward there is no mean of them: 0 would be read as one."""
    answers = [response for group in groups for response in group.responses]
    responses = [response for response in answers if not response.greedy] or answers
    rewards = [response.reward for response in responses if response.reward is not None]
    figures: Stats = {}
    if rewards:
        figures = {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    figures |= {
        "reward/failed": sum(r.score.value is None for r in answers) / len(answers),
        "length/mean": statistics.fmean(len(r.tokens) for r in responses),
        "length/max": float(max(len(r.tokens) for r in responses)),
        "unfinished": sum(not r.finished for r in responses) / len(responses),
    }
    parts = {name for response in responses for name in response.score.parts}
    for name in sorted(parts):
        values = [r.score.parts[name] for r in responses if name in r.score.parts]
        figures[f"reward/{name}"] = statistics.fmean(values)
    return figures
