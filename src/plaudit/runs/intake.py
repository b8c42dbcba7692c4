"""Read and measure a run's data before anything costly starts.

settings -> tokenizer -> data and its report -> number of steps, longest sequence -> check that it fits every model
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable
from typing import Any

from plaudit.algorithms.base import Objective
from plaudit.data.chat import Chats
from plaudit.data.load import LOADERS, Dataset
from plaudit.data.report import SourceReport
from plaudit.data.stream import Stream
from plaudit.environments.agents import Agents, world_of
from plaudit.environments.base import World
from plaudit.environments.episodes import row_of
from plaudit.models.described import check_scores, end_ids, positions
from plaudit.models.folders import local_folder, rounding
from plaudit.models.settings import Longest
from plaudit.models.tokenizer import load_tokenizer
from plaudit.rewards.rules import check_reference
from plaudit.settings.tree import Settings
from plaudit.support.fields import refuse
from plaudit.support.paths import is_here

FEW, ENOUGH = 30, 100
"""An offline run with fewer than FEW steps gets a warning, which recommends ENOUGH steps."""
MOST_PASSES = 20


class Intake:
    """Tokenizer, rows and steps of a run. Raises DataError for unusable data, SettingsError for rows that are too long
    for a judge or contain today's date."""

    def __init__(self, settings: Settings, objective: Objective, say: Callable[[str], None]):
        self.settings, self.objective = settings, objective
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path), tried=False)
        ends: tuple[int, ...] = ()
        if (path := settings.model.path) is not None:
            ends = end_ids(path)
            for line in rounding(local_folder(path)) if is_here(path) else ():
                say(f"model.path={path}: {line}")
        refers = check_reference(settings.rewards)
        self.world = world_of(settings.environment)
        tools = [] if self.world is None else self.world.shown
        self.chats = Chats(self.tokenizer, settings.data, ends, tools)
        self.data = LOADERS[objective.data](settings.data, self.tokenizer, settings.seed, ends, refers, tools)
        say(self.data.report.table())
        if self.world is not None:
            refuse(unplayable(self.world, self.data), plain=True)
        refuse(dated(self.data.report.sources), plain=True)
        if (limit := settings.evaluate.limit) < len(self.data.validation):
            say(f"  validation measures the first {limit:,} (evaluate.limit)")
        self.steps = self._steps()
        self.longest = longest_of(settings, objective, self.data.longest)
        if settings.samples:
            refuse(unlike_judges(settings, self.tokenizer, self.longest), plain=True)

    @property
    def as_chat(self) -> bool | None:
        """True if the train rows have chats; else the setting data.as_chat."""
        chats = any(source.chat for source in self.data.report.sources if source.role == "train")
        return True if chats else self.settings.data.as_chat

    def _steps(self) -> int:
        train = self.settings.train
        if train.steps is not None:
            return train.steps
        items = self.data.cursor(self.settings.seed).length
        if self.objective.online:
            return max(1, -(-round(train.epochs * items) // self.settings.rollout.prompts_per_step))
        return max(1, round(train.epochs * -(-items // train.batch_size)))


def few_steps(s: Settings, steps: int) -> list[str]:
    """Return a warning if an offline run has fewer than FEW steps and `train.steps` is not set; else []."""
    if steps >= FEW or s.train.steps is not None or s.objective.online:
        return []
    more = min(MOST_PASSES, math.ceil(s.train.epochs * ENOUGH / steps))
    again = f" Read the rows more often: train.epochs={more}" if more > s.train.epochs else ""
    return [f"the run has {steps} step{'s' * (steps > 1)}, in which the loss will hardly move.{again}"]


def dated(sources: Iterable[SourceReport]) -> list[str]:
    """Return an error if a chat template prints today's date, since the run could not be repeated exactly; else []."""
    if not any(source.chat.get("prints_date") for source in sources):
        return []
    return [
        (
            "the chat template prints today's date, so tomorrow's rows would differ: fix it, for instance by "
            f"'data.chat_template_kwargs={{strftime_now: \"{datetime.date.today()}\"}}'"
        )
    ]


def unplayable(world: World | Agents, data: Dataset[Any]) -> list[str]:
    """Return an error if the prompts are no chats, or if the first of them lacks what `reset` asks for; else []."""
    if not all(source.chat for source in data.report.sources):
        return ["environment: episodes are chats, and the prompts are plain texts: set data.as_chat=true"]
    items = data.validation if isinstance(data.items, Stream) else data.items
    columns = row_of(items[0], 0) if len(items) else dict.fromkeys(world.needed)
    lacking = [name for name in world.needed if name not in columns]
    there = f"the rows have {', '.join(sorted(columns))}"
    return [f"environment: it asks for {name!r}, and {there}: give it a default" for name in lacking]


def longest_of(settings: Settings, objective: Objective, row: int) -> Longest:
    """Return the longest sequence that models must have positions for; `row`: tokens of the longest row or prompt."""
    if objective.online:
        section = "environment" if settings.environment.on else "rollout"
        return Longest(row + settings.answer_tokens, f"the longest prompt and {section}.max_tokens")
    return Longest(row, "the longest row")


def unlike_judges(settings: Settings, tokenizer: Any, longest: Longest) -> list[str]:
    """Return an error for each judge that has the policy's vocabulary but too few positions for the longest sequence.
    Raises ValueError for models that are not judges."""
    problems = []
    for reward in settings.rewards:
        if reward.kind != "judge":
            continue
        check_scores(reward.path)
        own = load_tokenizer(reward.path, tried=False)
        if own.get_vocab() == tokenizer.get_vocab():
            end = 0 if own.eos_token_id is None else 1  # the judge appends an end token to cut answers
            whose = f"the judge {reward.path}, beside its end token,"
            problems += longest.unfit(whose, positions(reward.path) - end)
    return problems
