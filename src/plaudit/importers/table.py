"""Turn another system's settings file into a recipe, with a table of its keys (YAML files in this folder).

    file -> `flat` -> each key is refused | ignored, with the reason | mapped | worked out by a function -> `Imported`

A table has five parts:

    mapped:      {their key: our key, or {method: our key} where methods differ}
    worked_out:  {name of a function: {theirs: {their key: its type}, ours: [our keys]}}
    ignored:     {reason why it has no effect here: [their keys]}
    refused:     {reason: {their key: [values that have no effect and are accepted]}}
    defaults:    {method, or all: {their key: its default in their system}}

Only defaults that change what is learned and that differ from ours are listed. null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.settings.imported import Imported
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import Leaf, Rule, leaves, nearest, refuse, shown

KINDS: dict[str, Any] = {"int": int, "count": int, "float": float, "bool": bool, "text": str, "any": Any}
KINDS |= {"texts": str | list[str], "numbers": list[float]}
"""Names of types in the tables' part `worked_out`; a count is at least 1."""
PARTS = ("mapped", "worked_out", "ignored", "refused", "defaults")


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The keys of one system, as in the module's docstring."""

    system: str
    mapped: Mapping[str, str | Mapping[str, str]]
    worked_out: Mapping[str, Mapping[str, Any]]
    ignored: Mapping[str, str]
    """Their key -> reason."""
    refused: Mapping[str, tuple[str, list[Any]]]
    """Their key -> reason, and the values that are accepted."""
    defaults: Mapping[str, Mapping[str, Any]]

    @property
    def kinds(self) -> dict[str, str]:
        """{their key: its type}, for keys that functions work out."""
        return {key: kind for part in self.worked_out.values() for key, kind in part["theirs"].items()}

    @property
    def known(self) -> list[str]:
        return [*dict.fromkeys([*self.mapped, *self.kinds, *self.ignored, *self.refused])]

    def ours(self, key: str) -> list[str]:
        """Return our settings that a key may set; [] for none."""
        found = self.mapped.get(key, ())
        straight = [found] if isinstance(found, str) else found.values() if isinstance(found, Mapping) else ()
        worked = [ours for part in self.worked_out.values() if key in part["theirs"] for ours in part["ours"]]
        return [*dict.fromkeys([*straight, *worked])]

    def default(self, key: str, method: str) -> Any:
        return {**self.defaults.get("all", {}), **self.defaults.get(method, {})}.get(key)


@cache
def table(system: str, *files: str) -> KeyTable:
    """Read a table from this folder's YAML files. Rows of later files add or replace; defaults are the last file's."""
    import yaml

    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name in files:
        read = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
        new = {part: read.get(part) or {} for part in PARTS}
        new["ignored"] = {key: why for why, keys in new["ignored"].items() for key in keys}
        new["refused"] = {key: (why, free) for why, keys in new["refused"].items() for key, free in keys.items()}
        said = {*new["mapped"], *new["ignored"], *new["refused"]}
        for part in ("mapped", "ignored", "refused"):
            parts[part] = {key: row for key, row in parts[part].items() if key not in said}
        for part in PARTS:
            parts[part] = new[part] if part == "defaults" else parts[part] | new[part]
    return KeyTable(system=system, **parts)


@dataclass(kw_only=True)
class Translation:
    """The state of translating one file with a table; calling it returns the value of a key."""

    table: KeyTable
    method: str
    foreign: dict[str, Any]
    """Keys of the file with their values, none of them null."""
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    """Number of training processes."""
    found: dict[str, Any] = field(default_factory=dict)
    """Our settings so far, by their dotted keys."""
    updates: int = 1
    """Number of their optimizer steps in one of our steps."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, key: str, otherwise: Any = None) -> Any:
        """Return the key's value in the file, else its default in the other system, else `otherwise`."""
        if key in self.foreign:
            return self.foreign[key]
        default = self.table.default(key, self.method)
        return otherwise if default is None else default

    def refuse(self, key: str, why: str) -> None:
        self.problems.append(f"{key}={shown(self(key))}: {why}")


Found = Iterator[tuple[str, Any]]
"""Yields (our setting's dotted key, its value)."""
Work = Callable[[Translation], Found]
"""A function that turns several keys of the file together into our settings."""


def imported(reading: Translation, work: Mapping[str, Work]) -> Imported:
    """Translate a file. Raises SettingsError with every key that cannot be used."""
    translate(reading, work)
    refuse(reading.problems)
    order = _ours(reading.method)
    found = {key: reading.found[key] for key in order if key in reading.found}
    return Imported(
        recipe=placed(found), notes=tuple(reading.notes), environment=reading.environment, system=reading.table.system
    )


def translate(reading: Translation, work: Mapping[str, Work]) -> None:
    """Translate a reading's file: add the settings, notes and problems to the reading."""
    ours, table = _ours(reading.method), reading.table
    if not _complain(reading, ours):
        return
    reading.found.update(_mapped(reading, ours))
    for name, part in table.worked_out.items():
        for key, value in work[name](reading):
            assert key in part["ours"], (name, key)
            if key not in ours:
                continue
            reading.found[key] = value
            complaint = None if key == "rewards" else replace(ours[key], value=value).complaint()
            named = [theirs for theirs in part["theirs"] if theirs in reading.foreign]
            reading.problems += [f"{' and '.join(named) or name} give {complaint}"] if complaint else []
    reasons: dict[str, list[str]] = {}
    for key in reading.foreign:
        if key in table.ignored:
            reasons.setdefault(table.ignored[key], []).append(key)
    reading.notes += [f"ignored: {', '.join(keys)} ({why})" for why, keys in reasons.items()]


def flat(tree: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested file by their dotted keys, without null values. A mapping is a value if the table
    has its key, and else a section."""
    known = set(known)
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        inner = key not in known and any(one.startswith(f"{key}.") for one in known)
        if inner and value is not None and not isinstance(value, Mapping):
            raise SettingsError(f"{key}={shown(value)} must be a section with keys")
        found |= flat(value or {}, known, f"{key}.") if inner else {} if value is None else {key: value}
    return found


def placed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into a nested mapping."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found


def _ours(method: str) -> dict[str, Leaf]:
    from plaudit.algorithms import ALGORITHMS

    if method not in ALGORITHMS:
        raise SettingsError(f"there is no method {method!r}{nearest(method, ALGORITHMS)}")
    return {leaf.key: leaf for leaf in [*leaves(Settings()), *leaves(ALGORITHMS[method], "algorithm.")]}


def _complain(reading: Translation, ours: Mapping[str, Leaf]) -> bool:
    """Note unknown keys, invalid values and keys without a setting of this method. Return False if a value is invalid:
    then no function may read it."""
    table, sound = reading.table, True
    for key, value in list(reading.foreign.items()):
        complaint: str | None = None
        target = _target(table, key, reading.method)
        if isinstance(value, bool) and (table.kinds.get(key) in ("text", "texts") or _is_text(ours.get(target))):
            reading.foreign[key] = value = "yes" if value else "no"  # YAML 1.1 reads the word as a truth value
        if target in ours:
            complaint = replace(ours[target], key=key, value=value).complaint()
        elif key in table.kinds:
            kind = table.kinds[key]
            rule = Rule(least=1) if kind == "count" else Rule()
            complaint = Leaf(key=key, value=value, kind=KINDS[kind], rule=rule, prose="").complaint()
        elif key in table.mapped:
            complaint = f"{key}={shown(value)}: plaudit {reading.method} has no such setting; leave it out"
        elif key in table.refused:
            why, free = table.refused[key]
            if value not in free:
                reading.refuse(key, why)
        elif key not in table.ignored:
            reading.problems.append(f"{key} is no key of {table.system}{nearest(key, table.known)}")
        if complaint:
            reading.problems.append(complaint)
            sound = False
    return sound


def _is_text(leaf: Leaf | None) -> bool:
    return leaf is not None and leaf.kind in (str, str | None)


def _mapped(reading: Translation, ours: Mapping[str, Leaf]) -> Iterator[tuple[str, Any]]:
    for key in reading.table.mapped:
        value, target = reading(key), _target(reading.table, key, reading.method)
        if value is not None and target in ours:
            yield target, value


def _target(table: KeyTable, key: str, method: str) -> str:
    row = table.mapped.get(key, "")
    return row if isinstance(row, str) else row.get(method, "")
