"""Turn a settings file into a recipe with a table of rows, one for each of our settings that a key sets.

file -> `flat` -> `complaints`: type and bounds of our own setting -> `recipe`: conversion -> nested mapping
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plaudit.importers.table import placed
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import Leaf, Rule, leaves, nearest, shown


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One of our settings, set by one of their keys. A key may have several rows."""

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    """Convert their value to ours; None keeps the recipe's value."""
    kind: Any = None
    """Type of their value; None: the type of our setting."""
    rule: Rule | None = None
    """Allowed values; None: as for our setting."""
    ray: bool = False
    """True if the key has an effect only where the file chooses Ray."""
    idle: tuple[Any, ...] = (None,)
    """Values of a `ray` row that are accepted without Ray; any other value is refused there."""


def flat(tree: Mapping[str, Any], rows: Sequence[SettingRow]) -> dict[str, Any]:
    """Return every key of the table with its value in a file of sections, or None. Raises SettingsError for an unknown
    key."""
    values: dict[str, Any] = {row.theirs: None for row in rows}
    sections = {key.partition(".")[0] for key in values}
    for section, inner in tree.items():
        _check(section, sections, "")
        if inner is not None and not isinstance(inner, Mapping):
            raise SettingsError(f"{section}={shown(inner)} must be a section with keys")
        known = {key.partition(".")[2] for key in values if key.startswith(f"{section}.")}
        for key, value in (inner or {}).items():
            _check(str(key), known, f"{section}.")
            values[f"{section}.{key}"] = value
    return values


def _check(name: str, known: Iterable[str], prefix: str) -> None:
    if name not in known:
        raise SettingsError(f"there is no setting {prefix}{name}{nearest(name, known)}")


def complaints(values: Mapping[str, Any], rows: Iterable[SettingRow]) -> list[str]:
    """Return what is wrong with the values, by the types and bounds of our own settings. null is always allowed and
    keeps the recipe's value."""
    ours = {leaf.key: leaf for leaf in leaves(Settings())}
    found = {}
    for row in rows:
        if (value := values[row.theirs]) is not None and row.theirs not in found:
            leaf = ours.get(row.ours) or Leaf(key="", value=None, kind=Any, rule=Rule(), prose="")
            complaint = replace(
                leaf, key=row.theirs, value=value, kind=row.kind or leaf.kind, rule=row.rule or leaf.rule
            ).complaint()
            found[row.theirs] = [complaint] if complaint else []
    return [complaint for one in found.values() for complaint in one]


def recipe(values: Mapping[str, Any], rows: Iterable[SettingRow], *, ray: bool) -> dict[str, Any]:
    """Return the settings that a file sets, as a nested mapping."""
    found = {}
    for row in rows:
        value = values[row.theirs]
        if value is not None and (ray or not row.ray) and (ours := row.convert(value)) is not None:
            found[row.ours] = ours
    return placed(found)
