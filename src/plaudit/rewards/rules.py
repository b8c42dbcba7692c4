"""Rewards that need no model: built-in rules, rules that users register, and how settings become such a reward.

A rule is a plain function whose parameters name its inputs (`functions.py`). Built-in rules are pure: the same text
gives the same number.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from plaudit.rewards.earned import EarnedReward
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.mathematics import MathReward, reference_of
from plaudit.rewards.rubric import LlmReward
from plaudit.rewards.sandbox import CodeReward
from plaudit.rewards.settings import KINDS, RewardSettings
from plaudit.support import gym
from plaudit.support.fields import nearest
from plaudit.support.plugins import load_object, registered_again

__all__ = ["RULES", "CodeReward", "FunctionReward", "MathReward", "function_reward", "register_reward"]

Rule = TypeVar("Rule", bound=Callable[..., Any])

# A minus right after a digit, letter or bracket means subtraction ("10-5"). Commas group thousands. A full stop counts
# only before digits.
_NUMBER = (
    r"(?P<minus>(?<![\w)\]])[-\u2212])?[$\u20ac\u00a3]?(?P<inner_minus>(?<=[$\u20ac\u00a3])-)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
)
_N = r"[-\u2212]?[$\u20ac\u00a3]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
# Expressions that contain digits but are no plain number: names such as A5; fractions, mixed or not, ratios, times,
# powers and 1e3; a fraction in LaTeX; points, intervals and sets.
_LARGER = (
    rf"[^\W\d_]+\d\w*|(?:\d+\s+(?=\d+\s*/))?{_N}(?:(?:\s*[/^]\s*|:|[eE][-+]?(?=\d))[{{(]?{_N}[)}}]?)+|\\[dt]?frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}"
    rf"|[(\[{{]\s*{_N}(?:(?:\s*;\s*|\s*,\s+|,(?!\d{{3}}(?!\d))){_N})+\s*[)\]}}]"
)
_TERM = re.compile(f"{_LARGER}|{_NUMBER}")
_PLAIN = re.compile(rf"{_NUMBER}\.?")
_MARKER = "####"


def numbers(text: str) -> list[Decimal | None]:
    """Return the numbers in a text, in order: "-$1,200.50." holds -1200.50. None stands for an expression of several
    numbers, such as 3/4, 10:30, 2^5 and (3, 4), or a name such as A5."""
    return [_decimal(match) if match["digits"] else None for match in _TERM.finditer(text)]


def _decimal(match: re.Match[str]) -> Decimal:
    sign = "-" if match["minus"] or match["inner_minus"] else ""  # a product with -1 would have 28 digits
    return Decimal(f"{sign}{match['digits'].replace(',', '')}")


def final_number(text: str, *, need_marker: bool = False) -> Decimal | None:
    """Return the first number after the last `####`, on that or the next line with text. Without that marker return
    its last number, or None if `need_marker`. Return None too if there is no number, or it is not a plain one."""
    _, marker, after = text.rpartition(_MARKER)
    if marker:
        line = numbers(after.strip().partition("\n")[0])
        return line[0] if line else None
    found = [] if need_marker else numbers(after)
    return found[-1] if found else None


def reference_number(answer: str | None) -> Decimal:
    """Return the plain number after the last `####`, or that is the whole answer. Raises ValueError without one."""
    match = _PLAIN.fullmatch((answer or "").rpartition(_MARKER)[2].strip())
    if match is None:
        raise ValueError(
            f"the prompt's answer holds no number for gsm8k: {answer!r:.80}. It must be a plain number, or end in "
            "'#### 72'; kind: math compares others"
        )
    return _decimal(match)


def gsm8k(completion: str, answer: str | None, *, need_marker: bool = False) -> float:
    """1 if the completion's final number equals that of the worked answer (18 equals 18.00), else 0."""
    return float(final_number(completion, need_marker=need_marker) == reference_number(answer))


def reference_text(answer: str | None) -> str:
    """Return the answer itself. Raises ValueError if it is None."""
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    return answer


def exact_match(completion: str, answer: str | None, *, ignore_case: bool = False) -> float:
    """1 if completion and answer are equal but for the amount of whitespace (`ignore_case`: and for case), else 0."""
    answered, expected = " ".join(completion.split()), " ".join(reference_text(answer).split())
    return float(answered.casefold() == expected.casefold() if ignore_case else answered == expected)


def matches(completion: str, *, pattern: str) -> float:
    """1 if the regular expression is found in the completion, else 0."""
    return float(re.search(pattern, completion) is not None)


def length(token_count: int, *, target: int) -> float:
    """1 - |token_count - target| / target, but not below -1: 1 at the target, 0 for no tokens or twice the target.

    Raises ValueError for a target below 1.
    """
    if target < 1:
        raise ValueError(f"target={target} must be 1 or more tokens")
    return max(-1.0, 1 - abs(token_count - target) / target)


def overlong(token_count: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Soft overlong punishment, added to another reward (DAPO, Yu et al. 2025, eq. 13).

    0 up to max_tokens - cache_tokens, then falling linearly to -1 at max_tokens, and -1 beyond.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"cache_tokens={cache_tokens} must be between 1 and max_tokens={max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - token_count) / cache_tokens))


RULES: dict[str, Callable[..., Any]] = {
    "gsm8k": gsm8k,
    "exact_match": exact_match,
    "matches": matches,
    "length": length,
    "overlong": overlong,
    "reasoning_gym": gym.score,
}
"""Rules by the name that settings use as their kind."""
REFERENCES: Mapping[str, Callable[[str | None], object]] = {
    "gsm8k": reference_number,
    "exact_match": reference_text,
    "math": reference_of,
}
"""{kind of reward: function that reads a prompt's reference answer}. It raises ValueError for an unusable answer."""


def check_reference(rewards: Iterable[RewardSettings]) -> Callable[[str | None], None]:
    """Return a function that raises ValueError for a prompt's answer with which no completion could be scored."""
    reads = {kind: REFERENCES[kind] for one in rewards if one.weight and (kind := one.kind) in REFERENCES}

    def check(answer: str | None) -> None:
        for read in reads.values():
            read(answer)

    return check


def register_reward(name: str) -> Callable[[Rule], Rule]:
    """Decorator that registers a function as a rule, for `kind: name` in settings.

    Registering the same function again, as when a notebook's cell is run again, replaces it."""

    def add(function: Rule) -> Rule:
        if name in KINDS or (name in RULES and not registered_again(function, RULES[name])):
            raise ValueError(f"There is already a reward {name!r}. Register yours under another name.")
        RULES[name] = function
        return function

    return add


def function_reward(
    settings: RewardSettings,
) -> FunctionReward | CodeReward | MathReward | EarnedReward | LlmReward:
    """Return the reward of settings whose kind is "function", "code", "math", "environment", "llm" or a rule's name."""
    if settings.kind == "environment":
        return EarnedReward(settings.name)
    if settings.kind == "llm":
        return LlmReward(settings)
    if settings.kind in ("code", "math"):
        return (CodeReward if settings.kind == "code" else MathReward)(settings.name, settings.options)
    if settings.kind == "function":
        function = load_object(settings.function)
    elif settings.kind in RULES:
        if settings.kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(gym.LACKING)
        function = RULES[settings.kind]
    else:
        known = [*KINDS, *RULES]
        raise ValueError(f"there is no reward of kind {settings.kind!r}{nearest(settings.kind, known)}")
    return FunctionReward(
        function,
        name=settings.name,
        deadline=settings.deadline,
        thread=settings.thread,
        options=settings.options,
    )
