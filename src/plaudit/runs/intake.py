"""Read and measure a run's data before anything costly starts.

    settings -> tokenizer -> data and its report -> number of steps, longest sequence -> does it fit every model?
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from plaudit.algorithms.base import Objective
from plaudit.data.load import LOADERS
from plaudit.models.load import check_scores, end_ids, load_tokenizer, positions
from plaudit.settings.tree import Settings, SettingsError
from plaudit.crew.trainer import Longest


class Intake:
    """Tokenizer, rows and steps of a run. Raises DataError for unusable data, SettingsError for rows that would not
    fit."""

    def __init__(self, settings: Settings, objective: Objective, say: Callable[[str], None]):
        self.settings, self.objective = settings, objective
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
        ends = end_ids(settings.model.path) if settings.model.path is not None else ()
        self.data = LOADERS[objective.data](settings.data, self.tokenizer, settings.seed, ends)
        say(self.data.report.table())
        self._check_date()
        if (limit := settings.evaluate.limit) < len(self.data.validation):
            say(f"  validation measures the first {limit:,} (evaluate.limit)")
        self.steps = self._steps()
        self.longest = self._longest()
        if settings.samples:
            self._check_judges()

    def _check_date(self) -> None:
        """Refuse rows that would differ tomorrow: the run could not be repeated or resumed exactly."""
        if any(source.chat.get("prints_date") for source in self.data.report.sources):
            raise SettingsError(
                "the chat template prints today's date, so tomorrow's rows would differ: fix it, for instance by "
                f"'data.chat_template_kwargs={{strftime_now: \"{datetime.date.today()}\"}}'"
            )

    def _steps(self) -> int:
        train = self.settings.train
        if train.steps is not None:
            return train.steps
        items = self.data.cursor(self.settings.seed).length
        if self.objective.data == "prompts":
            return max(1, -(-round(train.epochs * items) // self.settings.rollout.prompts_per_step))
        return max(1, round(train.epochs * -(-items // train.batch_size)))

    def _longest(self) -> Longest:
        if self.objective.data == "prompts":
            room = self.data.longest + self.settings.rollout.max_tokens
            return Longest(room, "the longest prompt and rollout.max_tokens")
        return Longest(self.data.longest, "the longest row")

    def _check_judges(self) -> None:
        """Refuse models that are not judges, and answers for which a judge of this vocabulary has no positions."""
        for reward in self.settings.rewards:
            if reward.kind != "judge":
                continue
            check_scores(reward.path)
            own = load_tokenizer(reward.path)
            if own.get_vocab() == self.tokenizer.get_vocab():
                end = 0 if own.eos_token_id is None else 1  # that answers cut by length get
                self.longest.check(f"the judge {reward.path}, beside its end token,", positions(reward.path) - end)
