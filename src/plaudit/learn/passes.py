"""Limit the number of tokens of one pass, and halve it if memory runs out.

    batch -> cut(tokens) -> run each part -> results; memory runs out -> all again in parts of half the size

Neither gradients nor scores depend on how a batch is cut, so nothing else changes. Left out: ranks that wait for each
other within a pass; they all restart together instead (`loop/restart.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from plaudit.batch import Batch
from plaudit.learn.settings import SCORED, LearnSettings
from plaudit.runtime.memory import OutOfMemory, memory_tried, recover_memory
from plaudit.types import Stats

SHORTER = "Lower data.max_tokens, data.max_prompt_tokens or rollout.max_tokens"
SCORING = f"{SHORTER}, or take a machine with more memory; no setting makes a pass without gradients smaller than that"
LEARNING = (
    f"{SHORTER}, or set learn.activation_checkpointing=true, learn.precision=bfloat16 or model.lora.rank; "
    "learn.micro_tokens cannot be smaller"
)
log = logging.getLogger(__name__)
Result = TypeVar("Result")
Cutting = Callable[[int], Sequence[Batch]]
"""Cuts a batch into parts of at most the given number of tokens."""


class UnitTooLong(OutOfMemory):
    """A pass over a single unit (a row, or a pair of rows) does not fit in memory."""

    def __init__(self, tokens: int, advice: str):
        super().__init__(f"memory does not hold a pass over one unit of {tokens} tokens (a row, or a pair). {advice}")
        self.tokens, self.advice = tokens, advice

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokens, self.advice)


@dataclass
class TokenBudget:
    """Limit on the tokens of one pass, for passes of one kind (with or without gradients)."""

    tokens: int
    advice: str
    """Advice for the error: other settings that help."""
    times: int = 1
    """The limit in the settings as a multiple of learn.micro_tokens, for messages."""

    def __post_init__(self) -> None:
        self.asked = self.tokens

    def fit(
        self,
        cut: Cutting,
        run: Callable[[Batch], Result],
        *,
        clear: Callable[[], None] = lambda: None,
        ahead: Callable[[bool], None] = lambda more: None,
        again: bool = True,
    ) -> list[Result]:
        """Run every part and return the results in order. Call `ahead(more)` before each part; `more` is True if others
        follow. If memory runs out, call `clear`, halve `tokens` and run everything again; raise UnitTooLong if a single
        unit does not fit. Without `again`, raise the first attempt's error instead."""

        def each(parts: Sequence[Batch]) -> Iterator[Result]:
            for number, part in enumerate(parts, 1):
                ahead(number < len(parts))
                yield run(part)

        if not again:
            return list(each(cut(self.tokens)))
        while True:
            results: list[Result] = []
            parts = cut(self.tokens)
            with memory_tried() as failed:
                for result in each(parts):
                    results.append(result)
            if not failed:
                return results
            part = parts[len(results)]
            results.clear()
            clear()
            recover_memory()
            self._halve(part, failed[0])

    def _halve(self, part: Batch, why: str) -> None:
        size = len(part.tokens)
        if len(part) <= part.unit:
            raise UnitTooLong(size, self.advice)
        self.tokens = max(1, min(self.tokens, size) // 2)
        log.warning(
            "Memory ran out in a pass over %d tokens (%.80s): from now on a pass has at most %d. Set "
            "learn.micro_tokens=%d.",
            size,
            why,
            self.tokens,
            max(1, self.tokens // self.times),
        )

    @property
    def lowered(self) -> bool:
        return self.tokens < self.asked

    def lower(self, tokens: int) -> None:
        """Use at most this many tokens a pass from now on."""
        self.tokens = min(self.tokens, tokens)


def scoring(tokens: int) -> TokenBudget:
    """Return a TokenBudget for passes without gradients."""
    return TokenBudget(tokens, SCORING, times=SCORED)


@dataclass
class Passes:
    """The pass sizes of one rank, with gradients (`micro`) and without (`score`); all of its models share them."""

    micro: TokenBudget
    score: TokenBudget

    @classmethod
    def of(cls, settings: LearnSettings) -> Passes:
        return cls(TokenBudget(settings.micro_tokens, LEARNING), scoring(settings.score_tokens))

    def _budgets(self) -> dict[str, TokenBudget]:
        return {"micro": self.micro, "score": self.score}

    def figures(self) -> Stats:
        """Return lowered sizes as `micro_tokens/min` and `score_tokens/min`; ranks merge them to the smallest."""
        return {f"{name}_tokens/min": float(one.tokens) for name, one in self._budgets().items() if one.lowered}

    def agree(self, merged: Stats) -> None:
        """Lower the sizes to the smallest of all ranks, as in their merged figures."""
        for name, budget in self._budgets().items():
            budget.lower(int(merged.get(f"{name}_tokens/min", budget.tokens)))

    def state(self) -> dict[str, list[int]]:
        """Return the lowered sizes as {name: [number in the settings, lowered number]}."""
        return {name: [budget.asked, budget.tokens] for name, budget in self._budgets().items() if budget.lowered}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Set the lowered sizes that `state` returned, except sizes whose settings have changed since."""
        for name, (asked, tokens) in state.items():
            budget = self._budgets()[name]
            if asked == budget.asked:
                budget.lower(tokens)
