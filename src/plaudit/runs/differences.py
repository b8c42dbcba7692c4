"""Find the settings in which two runs differ, by their dotted keys.

settings.yaml of one run, settings of another -> pairs of values -> lines that describe them
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from plaudit.settings.tree import Settings, resolved
from plaudit.support.bounded import yaml_text
from plaudit.support.fields import flat
from plaudit.support.paths import at_home


def three_views(settings: Settings) -> tuple[dict[str, Any], ...]:
    """Return {key: value} three times: settings as given, with null ones resolved by the method, and the defaults."""
    method: Any = settings.algorithm
    plain = {one.name: one.default for one in fields(method) if one.default is not MISSING}
    made = {one.name: one.default_factory() for one in fields(method) if one.default_factory is not MISSING}
    fresh = replace(method, **plain, **made)
    alike = settings, replace(settings, algorithm=settings.objective), Settings(algorithm=fresh)
    return tuple(read_flat(resolved(one)) for one in alike)


def differences(
    theirs: Path, values: tuple[dict[str, Any], ...], free: tuple[str, ...], *, never: tuple[str, ...] = ()
) -> list[str]:
    """List settings that differ from a run's settings.yaml, a line each. `free`: keys left out, unless in `never`."""
    found = compared(theirs, values)
    if found is None:
        return ["its settings cannot be read"]
    differing = {key: values for key, values in found.items() if key in never or not within(key, free)}
    return [f"{key}: {there} there, {here} here" for key, (there, here) in differing.items()]


def compared(theirs: Path, values: tuple[dict[str, Any], ...]) -> dict[str, tuple[Any, Any]] | None:
    """Return {key: (the file's value, ours)} of the settings that differ; None if the file is incomplete.

    A setting that an older file lacks counts as its default. For a setting that is left to the method, the file may
    have the method's choice."""
    here, adapted, default = values
    try:
        there = read_flat(yaml_text(theirs))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError):
        return None
    there = {key: default[key] for key in here if key in default} | there
    pairs = {key: (there.get(key), here.get(key)) for key in {**there, **here}}
    return {k: pair for k, pair in pairs.items() if pair[0] != adapted.get(k) and not _alike(k, *pair)}


def _alike(key: str, there: Any, here: Any) -> bool:
    """True if the values are equal, or two spellings of one path."""
    if there == here or not (isinstance(there, str) and isinstance(here, str)):
        return bool(there == here)
    return key.endswith((".path", ".tokenizer")) and at_home(there).resolve() == at_home(here).resolve()


def within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def read_flat(text: str) -> dict[str, Any]:
    """Read the values of a settings file, by their dotted keys."""
    from omegaconf import OmegaConf

    return flat(OmegaConf.to_container(OmegaConf.create(text)))
