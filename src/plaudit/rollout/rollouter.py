"""From a prompt to a scored group: the engine answers, the reward judges.

Prompt -> engine.generate (the whole plan at once) -> Completion, ... -> reward.score -> shaped -> Group
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from plaudit.rewards.base import Reward
from plaudit.rewards.earned import unless_failed
from plaudit.rewards.settings import ShapingSettings
from plaudit.rewards.shaping import shaped
from plaudit.rewards.weighted import WeightedReward
from plaudit.rollout.engine import Sampler
from plaudit.types import Completion, Group, Prompt, Sampling

Play = Callable[[Prompt, Sequence[Sampling]], Awaitable[list[Completion]]]


class Groups(Protocol):
    """A source of groups: sampled now, or read from a record."""

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        """Return the scored group of the run's `index`-th prompt."""
        ...


class Rollouter:
    """Samples and scores one response per Sampling of `plan`. It keeps no state: a lost rollout can be run again.
    `play`, if given, plays an episode for each Sampling in place of one answer of the engine."""

    def __init__(
        self,
        engine: Sampler,
        reward: Reward,
        shaping: ShapingSettings,
        plan: Sequence[Sampling],
        *,
        seed: int,
        play: Play | None = None,
    ):
        self.engine, self.reward, self.shaping, self.play = engine, reward, shaping, play
        self.plan, self.seed = tuple(plan), seed

    async def rollout(self, index: int, prompt: Prompt) -> Group:
        """Return the scored group. Its samples depend only on (seed, index), the prompt and the weights."""
        plan = [replace(s, seed=completion_seed(self.seed, index, k)) for k, s in enumerate(self.plan)]
        answers = self.engine.generate(prompt.tokens, plan) if self.play is None else self.play(prompt, plan)
        completions = await answers
        scores = unless_failed(completions, await self.reward.score(prompt, completions))
        responses = [
            shaped(completion, score, self.shaping, greedy=sampling.greedy)
            for completion, score, sampling in zip(completions, scores, plan, strict=True)
        ]
        return Group(index=index, prompt=prompt, responses=tuple(responses))

    async def again(self, group: Group, lasting: bool) -> Group:
        """Score failed answers again: those whose failure is transient, or with `lasting` all. Return the group with
        the new scores and rewards and the same completions, or the group itself if there are no such answers. A reward
        that compares answers is shown the whole group."""
        failed = [one.score.failed and (lasting or one.score.transient) for one in group.responses]
        if not any(failed):
            return group
        whole = isinstance(self.reward, WeightedReward) and self.reward.compares
        shown = {n: one.completion for n, one in enumerate(group.responses) if whole or failed[n]}
        answers = list(shown.values())
        scores = unless_failed(answers, await self.reward.score(group.prompt, answers))
        responses = list(group.responses)
        for number, score in zip(shown, scores, strict=True):
            if failed[number]:
                responses[number] = shaped(shown[number], score, self.shaping, greedy=responses[number].greedy)
        return replace(group, responses=tuple(responses))


def completion_seed(seed: int, index: int, sample: int) -> int:
    """Return the seed of one completion: a 63-bit hash, so that seeds of neighbouring samples are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
