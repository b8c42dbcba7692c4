"""The rewards that a run's settings list, as one reward.

sections -> functions, loaded once -> checked with the columns of prompts
         -> functions, judges, servers, each timed -> WeightedReward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from plaudit.rewards.base import Reward, TimedReward
from plaudit.rewards.batched import LOOKED_AT
from plaudit.rewards.protocol import vocabulary_digest
from plaudit.rewards.remote import HttpReward
from plaudit.rewards.rubric import LlmReward
from plaudit.rewards.rules import FunctionReward, function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.rewards.weighted import WeightedReward
from plaudit.runtime.worker import Doing
from plaudit.support.fields import refuse

if TYPE_CHECKING:  # judges load torch
    from plaudit.rewards.judge import JudgeReward

MakeJudge = Callable[[RewardSettings, Any], "JudgeReward"]
MakeFunction = Callable[[RewardSettings, Reward], Reward]


class ListedRewards:
    """The rewards of a run's settings. Functions are loaded once, so that a file that is edited later is not loaded
    again after the loss of a rank."""

    def __init__(self, sections: Sequence[RewardSettings], *, renormalise: bool):
        self.sections, self.renormalise = tuple(sections), renormalise
        self._functions = [None if one.kind in ("judge", "http") else function_reward(one) for one in sections]
        names = (own.name if own else one.name or one.kind for own, one in zip(self._functions, sections, strict=True))
        self.names = tuple(names)
        """Each reward's name, under which its value is a part of the sum."""

    def check(self, items: Sequence[Any]) -> None:
        """Raise SettingsError for a function or rubric that asks for a column which the first prompts do not have."""
        functions = [one for one in self._functions if isinstance(one, FunctionReward | LlmReward)]
        prompts = items[:LOOKED_AT] if functions else ()
        refuse([why for one in functions if (why := one.lacking(prompts))], plain=True)

    def reward(self, judge: MakeJudge, function: MakeFunction, tokenizer: Any, doing: Doing) -> WeightedReward:
        """Return the weighted sum of the rewards. `judge` and `function` are an executor's ways to make a reward, in
        this process or others; `doing` is entered while a reward computes, to time it."""
        timed, parts = partial(doing, "rewards", "scores"), list[tuple[Reward, float, str]]()
        for section, own, name in zip(self.sections, self._functions, self.names, strict=True):
            reward: Reward
            if own is not None:
                reward = TimedReward(function(section, own), timed)
            elif section.kind == "judge":
                reward = judged = judge(section, tokenizer)
                judged.doing = timed
            else:
                reward = TimedReward(HttpReward(section, vocabulary=vocabulary_digest(tokenizer.get_vocab())), timed)
            parts.append((reward, section.weight, name))
        compares = any(section.pairwise for section in self.sections)
        return WeightedReward(parts, renormalise=self.renormalise, compares=compares)
