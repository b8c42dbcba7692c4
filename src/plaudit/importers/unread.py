"""Recognise files of systems that are not read, and answer with the nearest settings (`unread.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from plaudit.importers.table import table
from plaudit.settings.tree import SettingsError

ENOUGH = 2
"""Telling keys that a file has at least."""


def refuse_unread(tree: Mapping[str, Any]) -> None:
    """Raise SettingsError for a file of such a system, with the setting that is nearest to each of its keys."""
    systems = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    matches = {name: len({*tree} & {*one["telling"]}) for name, one in systems.items()}
    system = max(matches, key=lambda name: matches[name])
    if matches[system] < ENOUGH:
        return
    nearest = {key: answer for key in tree if (answer := _nearest(systems[system]["nearest"], key))}
    lines = "".join(f"\n  - {key}: {answer}" for key, answer in nearest.items())
    others = [key for key in tree if key not in nearest]
    rest = f"\nNo setting is near {', '.join(others)}." if others else ""
    raise SettingsError(
        f"this is a file of {system}, which is not read. Write a recipe of Plaudit with the nearest settings "
        f"(docs/settings.md):{lines}{rest}"
    )


def _nearest(own: Mapping[str, str], key: str) -> str:
    return own.get(key) or ", ".join(table("TRL", "trl").ours(key)[:1])
