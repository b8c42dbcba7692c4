"""A reward function that gets a batch at once, as TRL calls its functions.

    def reward(completions, ground_truth, **kwargs): ...     prompts, completions, completion_ids, the rows' columns

    the answers to one prompt -> lists, one entry an answer -> the function -> a list of numbers or None -> Scores

Left out: what only TRL's trainer has (`ABSENT`). A function that needs it is refused before a run starts.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import Any, SupportsFloat

from plaudit.rewards.settings import refuse_options
from plaudit.support.fields import close
from plaudit.types import Completion, Prompt

BATCH = ("prompts", "completions", "completion_ids")
LOGS = ("log_extra", "log_metric")
ABSENT = ("trainer_state", "environments")
"""Arguments of TRL's that exist only in its trainer."""
OTHERS = ("queries", "solution_str")
"""Parameters by which functions for OpenRLHF and verl are told apart, which share other names with TRL's."""
ANSWERS = ("answer", "completion", "response", "output")
"""Columns whose text becomes the prompt's answer."""
LOOKED_AT = 1000
"""Number of first prompts whose columns are checked."""

Read = Callable[[Any], list[Any]]
"""Turns a function's result into a list with an entry per answer: a number, None, or a dict of reward and parts."""


class Batched:
    """Calls a function that takes a batch. `columns`: its required parameters beside BATCH, LOGS and options."""

    def __init__(self, function: Callable[..., Any], name: str, options: Mapping[str, Any]):
        self.function, self.name, self.options = function, name, dict(options)
        parameters = inspect.signature(function).parameters.values()
        self.open = any(one.kind is one.VAR_KEYWORD for one in parameters)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.bound = {*options, *(function.keywords if isinstance(function, functools.partial) else ())}
        named = [one for one in parameters if one.kind in by_name and one.name not in self.bound]
        self.named = [one.name for one in named]
        needed = [one.name for one in named if one.default is one.empty]
        self.columns = [one for one in needed if one not in (*BATCH, *LOGS)]
        """Columns that the rows must have: the function's required parameters."""
        self.reads_tokens = self.open or "completion_ids" in self.named
        refuse_options(name, () if self.open else options, [one.name for one in parameters])

    def looked_up(self) -> list[str]:
        """Return the names in ABSENT that the function's source reads from its `**kwargs`; [] without a source."""
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            return []
        return [one for one in ABSENT if self.open and re.search(rf"""\[\s*["']{one}["']\s*\]""", source)]

    def call(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Callable[[], Any], Read]:
        """Return (call, read) for a prompt's answers: `read` turns the call's result into one entry per answer."""
        count = len(completions)
        logged: list[dict[str, float]] = [{} for _ in completions]

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for own, value in zip(logged, values, strict=True):
                if isinstance(value, SupportsFloat):
                    own[str(column)] = float(value)

        def log_metric(name: str, value: Any) -> None:
            log_extra(name, [value] * count)

        texts: list[Any] = [one.text for one in completions]
        asked: Any = prompt.text
        if prompt.messages:  # a chat, whose answers are chats of one turn, or of an episode's turns
            asked = [dict(turn) for turn in prompt.messages]
            texts = [turns_of(one) for one in completions]
        arguments: dict[str, Any] = dict.fromkeys(self.columns)
        arguments |= {**columns_of(prompt), "prompts": asked}
        arguments = {name: [value] * count for name, value in arguments.items()}
        arguments |= {"completions": texts, "log_extra": log_extra, "log_metric": log_metric}
        if self.reads_tokens:
            arguments["completion_ids"] = [list(one.tokens) for one in completions]
        passed = {
            key: value for key, value in arguments.items() if key in self.named or (self.open and key not in self.bound)
        }

        return lambda: self.function(**(passed | self.options)), lambda result: self._results(result, logged)

    def _results(self, result: Any, logged: Sequence[Mapping[str, float]]) -> list[Any]:
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise TypeError(f"function returned {result!r:.80}: it gets a batch, and must return a list of numbers")
        values = list(result)
        if len(values) != len(logged):
            raise ValueError(f"function returned {len(values)} numbers for {len(logged)} completions")
        return [{"reward": value, **own} if own else value for value, own in zip(values, logged, strict=True)]


def turns_of(completion: Completion) -> list[Mapping[str, Any]]:
    """Return the messages of an episode, from the policy's first on, or an answer as a message."""
    messages = () if completion.episode is None else completion.episode.messages
    said = list(dropwhile(lambda one: one["role"] != "assistant", messages))
    return said or [{"role": "assistant", "content": completion.text}]


def batched(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Batched | None:
    """Return a `Batched` for a function that takes a batch; None for a function that takes one answer."""
    parameters = inspect.signature(function).parameters
    catches_all = [one.kind for one in parameters.values()] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]  # a decorator's wrapper: its signature has no names
    if any(one in parameters for one in OTHERS) or not (catches_all or any(one in parameters for one in BATCH)):
        return None
    return Batched(function, name, options)


def lacking(
    name: str, needed: Iterable[str], prompts: Sequence[Prompt], known: Collection[str], answers: Sequence[str] = ()
) -> str:
    """Return an error if no row has a column that the function needs, else "". `known`: further names that parameters
    may have, for the message. `answers`: names of the reference answer, which count if some row has one."""
    extra = {column for prompt in prompts for column in prompt.extra}
    answered = any(prompt.answer is not None for prompt in prompts)
    columns = extra | {*answers} if answered else extra
    absent = next((one for one in needed if one not in columns), "")
    if absent in ABSENT:
        return (
            f"the reward {name!r} asks for {absent!r}, which only TRL's trainer has: give it a default, or leave it out"
        )
    return absent and (
        f"the reward {name!r} asks for {absent!r}, which is neither a column of the rows beside the prompt (there are: "
        f"{', '.join(sorted(extra | {*ANSWERS[:1] * answered})) or 'none'}) nor one of {', '.join(known)}: rename a "
        f"column, give the parameter a default, or set it in the reward's options{close(absent, known)}"
    )


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return a row's columns besides its prompt. The answer has each name in ANSWERS: its column's name is not kept."""
    answers = {} if prompt.answer is None else dict.fromkeys(ANSWERS, prompt.answer)
    return answers | dict(prompt.extra)
