"""In what the settings of two runs differ, by their dotted keys.

settings.yaml of one, settings of the other -> pairs of values -> lines that tell them
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from plaudit.settings.tree import Settings, resolved
from plaudit.support.paths import at_home


def told(settings: Settings) -> tuple[dict[str, Any], ...]:
    """What settings say, the same with what is left to the method, and what they say by default."""
    method: Any = settings.algorithm
    plain = {one.name: one.default for one in fields(method) if one.default is not MISSING}
    made = {one.name: one.default_factory() for one in fields(method) if one.default_factory is not MISSING}
    fresh = replace(method, **plain, **made)
    alike = settings, replace(settings, algorithm=settings.objective), Settings(algorithm=fresh)
    return tuple(flat(resolved(one)) for one in alike)


def differences(
    theirs: Path, told: tuple[dict[str, Any], ...], free: tuple[str, ...], *, never: tuple[str, ...] = ()
) -> list[str]:
    """Differences from a run's file, except for settings in `free` and not in `never`."""
    found = compared(theirs, told)
    if found is None:
        return ["its settings cannot be read"]
    kept = {key: values for key, values in found.items() if key in never or not within(key, free)}
    return [f"{key}: {there} there, {here} here" for key, (there, here) in kept.items()]


def compared(theirs: Path, told: tuple[dict[str, Any], ...]) -> dict[str, tuple[Any, Any]] | None:
    """By key what a run's file says and what settings say, where they differ. An older file lacks settings that came
    later, which had their defaults, and has those that were left to the method as it took them. None if the file was
    cut off by what ended the run."""
    here, adapted, default = told
    try:
        there = flat(theirs.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, OmegaConfBaseException):
        return None
    there = {key: default[key] for key in here if key in default} | there
    pairs = {key: (there.get(key), here.get(key)) for key in {**there, **here}}
    return {k: pair for k, pair in pairs.items() if pair[0] != adapted.get(k) and not _alike(k, *pair)}


def _alike(key: str, there: Any, here: Any) -> bool:
    """True if equal, or two spellings of one path."""
    if there == here or not (isinstance(there, str) and isinstance(here, str)):
        return bool(there == here)
    return key.endswith((".path", ".tokenizer")) and at_home(there).resolve() == at_home(here).resolve()


def within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(text: str) -> dict[str, Any]:
    """The values of a settings file by their dotted keys."""
    from omegaconf import OmegaConf

    def walk(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict) or not value:
            return {prefix: value}
        inner = [walk(f"{prefix}.{key}" if prefix else str(key), entry) for key, entry in value.items()]
        return {key: leaf for leaves in inner for key, leaf in leaves.items()}

    return walk("", OmegaConf.to_container(OmegaConf.create(text)))
