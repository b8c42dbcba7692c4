"""Load the rewards that score answers in an evaluation: gold, a judge, rewards of a run, each under its name.

settings -> {name: Reward}, every model loaded once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plaudit.evaluate.judge import Judge
from plaudit.evaluate.settings import ComputeSettings, ScoringSettings
from plaudit.models.device import device_of
from plaudit.rewards.base import Reward
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.protocol import vocabulary_digest
from plaudit.rewards.remote import HttpReward, check_servers
from plaudit.rewards.rubric import LlmReward
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.runtime.coroutines import finished
from plaudit.types import Prompt


def computing(settings: ComputeSettings) -> str:
    """Set torch's number of CPU threads from the settings, and return the torch device that they name."""
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return device_of(settings.device)


class Measures:
    """Rewards by name. Functions are loaded and servers are asked for their health before any model is loaded."""

    def __init__(self, settings: ScoringSettings, say: Callable[[str], None], *, as_chat: bool | None = None):
        self.scoring, self.as_chat = settings, as_chat
        self.device = computing(settings)
        functions = [] if settings.gold is None else [("gold", _gold(settings))]
        self.learned: list[tuple[str, RewardSettings]] = []
        """Judges and servers: made for a given tokenizer, since they may read the answers' tokens."""
        for entry in settings.rewards:
            if entry.kind in ("judge", "http"):
                self.learned.append((entry.name or (entry.path if entry.kind == "judge" else "http"), entry))
            else:
                function = function_reward(entry)
                functions.append((function.name, function))
            for problem in finished(check_servers(entry)) if entry.asked else ():
                say(f"warning: {problem}; the other reward servers are used")
        self.functions = dict(functions)
        names = ["judge", *(name for name, _ in (*functions, *self.learned))]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two measures are called {twice[0]!r}: give each entry of rewards a `name` of its own")
        self._judges: dict[str, Judge] = {}

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a function that cannot be called with the columns that the prompts' rows have."""
        for one in self.functions.values():
            if isinstance(one, FunctionReward | LlmReward) and (why := one.lacking(prompts)):
                raise ValueError(why)

    def judge(self, path: str) -> Judge:
        """Return the judge of a checkpoint, which is loaded at its first use."""
        if path not in self._judges:
            self._judges[path] = Judge.load(path, device=self.device, token_budget=self.scoring.score_tokens)
        return self._judges[path]

    def rewards(self, judge: str | None, tokenizer: Any | None) -> dict[str, Reward]:
        """Return rewards by name, for answers sampled with `tokenizer`; None if only the answers' texts are known."""
        found: dict[str, Reward] = dict(self.functions)
        if judge is not None:
            found["judge"] = self.judge(judge).reward(tokenizer, as_chat=self.as_chat)
        for name, entry in self.learned:
            if entry.kind == "judge":
                found[name] = self.judge(entry.path).reward(tokenizer, as_chat=self.as_chat)
            else:
                digest = "" if tokenizer is None else vocabulary_digest(tokenizer.get_vocab())
                found[name] = HttpReward(entry, vocabulary=digest)
        return found


def _gold(settings: ScoringSettings) -> Reward:
    assert settings.gold is not None
    try:
        return function_reward(
            RewardSettings(kind="function", name="gold", function=settings.gold, options=dict(settings.gold_options))
        )
    except (AttributeError, TypeError) as error:  # there is no such function, or its arguments differ
        raise ValueError(f"gold: {error}") from error
