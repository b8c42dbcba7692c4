"""What a run learns from, read and measured before anything costly starts.

settings -> tokenizer -> data and its report -> number of steps, longest sequence -> is there room for it everywhere?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from plaudit.algorithms.base import Objective
from plaudit.data.load import Dataset, load_demonstrations, load_preferences, load_prompts
from plaudit.models.families import read_config
from plaudit.models.keys import UnsupportedError
from plaudit.models.load import check_scores, load_tokenizer, positions
from plaudit.settings import Settings, SettingsError
from plaudit.trainer import Longest

LOADERS: Mapping[str, Callable[..., Dataset[Any]]] = {
    "demonstrations": load_demonstrations,
    "preferences": load_preferences,
    "prompts": load_prompts,
}


class Intake:
    """Tokenizer, rows and steps of a run. Raises DataError for data that cannot be used, SettingsError for what would
    not fit."""

    def __init__(self, settings: Settings, objective: Objective, say: Callable[[str], None]):
        self.settings, self.objective = settings, objective
        self.tokenizer = load_tokenizer(str(settings.model.tokenizer or settings.model.path))
        self.data = LOADERS[objective.data](settings.data, self.tokenizer, settings.seed)
        say(self.data.report.table())
        if (limit := settings.evaluate.limit) < len(self.data.validation):
            say(f"  validation measures the first {limit:,} (evaluate.limit)")
        self.steps = self._steps()
        self.longest = self._longest()
        if settings.samples:
            self._check_engine()
            self._check_judges()

    def _steps(self) -> int:
        train = self.settings.train
        if train.steps is not None:
            return train.steps
        items = self.data.cursor(self.settings.seed).length
        if self.objective.data == "prompts":
            return max(1, -(-round(train.epochs * items) // self.settings.rollout.prompts_per_step))
        return max(1, round(train.epochs * -(-items // train.batch_size)))

    def _longest(self) -> Longest:
        items = [*self.data.items, *self.data.validation]
        if self.objective.data == "prompts":
            asked = max(len(prompt.tokens) for prompt in items)
            return Longest(asked + self.settings.rollout.max_tokens, "the longest prompt and rollout.max_tokens")
        return Longest(max(len(row.tokens) for item in items for row in item), "the longest row")

    def _check_engine(self) -> None:
        """Refuse answers that vLLM would cut short of rollout.max_tokens, and say nothing, and a context that it would
        refuse once it has started."""
        vllm = self.settings.rollout.for_vllm()
        if vllm is None or vllm.max_length is None:
            return
        setting, room = "rollout.vllm.max_length", self._positions()
        if room is not None and vllm.max_length > room:
            raise SettingsError(f"{setting}={vllm.max_length}, but the model has {room} positions: give at most those")
        self.longest.check(setting, vllm.max_length, otherwise=f", or raise {setting}")

    def _positions(self) -> int | None:
        """Of the policy; None for a fresh one of a family that transformers computes."""
        model = self.settings.model
        if model.path is not None:
            return positions(model.path)
        with suppress(UnsupportedError):
            return read_config(model.config).max_positions
        return None

    def _check_judges(self) -> None:
        """Refuse judges that are none, and answers that a judge of this vocabulary would have no positions for."""
        for reward in self.settings.rewards:
            if reward.kind != "judge":
                continue
            check_scores(reward.path)
            own = load_tokenizer(reward.path)
            if own.get_vocab() == self.tokenizer.get_vocab():
                end = 0 if own.eos_token_id is None else 1  # that answers cut by length get
                self.longest.check(f"the judge {reward.path}, beside its end token,", positions(reward.path) - end)
