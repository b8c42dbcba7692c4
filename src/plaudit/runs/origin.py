"""Read a run's saved settings, with relative paths resolved from the folder in which the run was started.

settings.yaml, data.json -> folders to look in -> settings, in which relative paths that exist there are absolute
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
    r"|(critic|reference)\.path|rollout\.replay|algorithm\.teachers(\.path)?)"
)
"""Settings that may be paths; in mappings (sources to shares or splits) the keys may be."""


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Read a run's settings, as nested mappings. Raises SettingsError if they cannot be read."""
    settings = read_saved(folder / SETTINGS)
    found: dict[str, Any] = _found(settings, "", _homes(folder, settings))
    return found


def _homes(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """Return the folders to resolve paths from: `started_in` of data.json; the run's folder without OUTPUT/NAME."""
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
        return {_whole(str(name), homes): _found(one, f"{key}.path", homes) for name, one in value.items()}
    if isinstance(value, Mapping):
        return {name: _found(one, f"{key}.{name}".lstrip("."), homes) for name, one in value.items()}
    if isinstance(value, list):
        return [_found(one, key, homes) for one in value]
    return _whole(value, homes) if named and isinstance(value, str) else value


def _whole(path: str, homes: Sequence[Path]) -> str:
    """Return `path` in the first of `homes` where it exists, else unchanged. FILE:REST is tried whole, then as FILE."""
    name, colon, rest = path.rpartition(":")
    looked_for = path and "{" not in path and not at_home(path).is_absolute()  # not a path but a chat template's text
    for home in homes if looked_for else ():
        for one, end in ((path, ""), (name, f"{colon}{rest}")):
            if one and (home / one).exists():
                return f"{home / one}{end}"
    return path
