"""Fit advice after a health warning to the run: with its rewards' names and the present values of its settings.

"lower optimizer.learning_rate", settings -> "lower optimizer.learning_rate (now 0.001)", or nothing to say
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_KEY = r"\w+\.[\w.=]+"
_ABOUT = re.compile(
    rf"^(?P<before>.*?)\b(?P<verb>lower|raise|widen|set|change) (?P<keys>{_KEY}( \| {_KEY})*)(?P<after>.*)$"
)


def advised(
    items: Iterable[str | Mapping[str, str]], settings: Mapping[str, Any] | None, rewards: Mapping[str, str]
) -> str:
    """Return all advice as one sentence. `settings`: by dotted key, None if unknown. `rewards`: kind by name."""
    text = "; ".join(_told(items, settings, rewards))
    return f"{text[:1].upper()}{text[1:]}{'.' * bool(text)}"


def named(rewards: Mapping[str, str]) -> str:
    """Return a run's rewards in words: "the judge", "the reward short", "the rewards gsm8k and short"."""
    if not rewards:
        return "the reward"
    if set(rewards.values()) == {"judge"} and len(rewards) == 1:
        return "the judge"
    *others, last = rewards
    return f"the rewards {', '.join(others)} and {last}" if others else f"the reward {last}"


def _told(
    items: Iterable[str | Mapping[str, str]], settings: Mapping[str, Any] | None, rewards: Mapping[str, str]
) -> Iterator[str]:
    for item in items:
        if not isinstance(item, str):
            if rewards and "judge" not in rewards.values():
                continue
            item = item["judge"]
        item = item.replace("{rewards}", named(rewards))
        about = _ABOUT.match(item)
        part = item if about is None else _about(about, settings)
        if part:
            yield part


def _about(about: re.Match[str], settings: Mapping[str, Any] | None) -> str:
    """Return the advice for the setting that the run has; "" if it has none of them or follows the advice already."""
    verb, asked = about["verb"], dict(one.partition("=")[::2] for one in about["keys"].split(" | "))
    if settings is None:
        return f"{about['before']}{verb} {about['keys'].replace(' | ', ' or ')}{about['after']}"
    there = {key: settings[key] for key in asked if key in settings}
    if not there:
        return ""
    key = next((key for key, value in there.items() if value), next(iter(there)))
    value, wanted = there[key], asked[key]
    if verb == "set":
        met = str(value).lower() == wanted if wanted else bool(value)
        done = "" if met else f"set {key}{'=' * bool(wanted)}{wanted}"
    elif verb == "change":
        done = f"change {key}={wanted}" if value == wanted else ""
    elif not value:  # 0 or null: the setting is off
        done = "" if verb == "lower" else f"set {key}"
    else:
        lowest = verb == "lower" and value == 1 and isinstance(value, int)
        shown = list(value) if isinstance(value, tuple) else value
        done = "" if lowest else f"{verb} {key} (now {shown})"
    return f"{about['before']}{done}{about['after']}" if done else ""
