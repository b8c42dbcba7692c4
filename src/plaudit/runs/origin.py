"""A run's settings with its relative paths as it read them: from where it was started, wherever it and its reader are.

settings.yaml, data.json -> folders to look in -> settings, in which the relative paths that are found are whole
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.runs.records import DATA, SETTINGS, STARTED
from plaudit.settings.recipes import read_saved
from plaudit.support.bounded import content, record
from plaudit.support.paths import at_home

PATHS = re.compile(
    r"(data\.(train|validation|split|chat_template)|plugins|rewards\.(path|function)|model\.(path|tokenizer)"
    r"|(critic|reference)\.path|rollout\.replay)"
)
"""Settings that may be paths. Of a mapping the keys are: sources with their shares, or splits."""


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Read a run's settings, as nested mappings. Raises SettingsError if they cannot be read."""
    settings = read_saved(folder / SETTINGS)
    found: dict[str, Any] = _found(settings, "", _homes(folder, settings))
    return found


def _homes(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """Where the run was started; and, if it was moved with all around it, what is there now."""
    try:
        report = record(content(folder / DATA))
        started = [Path(report[STARTED])]
    except (OSError, ValueError, KeyError, TypeError):
        started = []
    own = at_home(str(settings.get("output"))) / str(settings.get("name"))
    parts, place = own.parts, folder.resolve()
    ends = not own.is_absolute() and place.parts[-len(parts) :] == parts
    return [*started, *([place.parents[len(parts) - 1]] if ends else [])]


def _found(value: Any, key: str, homes: Sequence[Path]) -> Any:
    named = PATHS.fullmatch(key) is not None
    if isinstance(value, Mapping) and named:
        return {_whole(str(name), homes): one for name, one in value.items()}
    if isinstance(value, Mapping):
        return {name: _found(one, f"{key}.{name}".lstrip("."), homes) for name, one in value.items()}
    if isinstance(value, list):
        return [_found(one, key, homes) for one in value]
    return _whole(value, homes) if named and isinstance(value, str) else value


def _whole(path: str, homes: Sequence[Path]) -> str:
    """Return the path from the first folder that has it, else as it is. What follows a colon may be no path."""
    name, colon, rest = path.rpartition(":")
    looked_for = path and "{" not in path and not at_home(path).is_absolute()  # that is a chat template's text
    for home in homes if looked_for else ():
        for one, end in ((path, ""), (name, f"{colon}{rest}")):
            if one and (home / one).exists():
                return f"{home / one}{end}"
    return path
