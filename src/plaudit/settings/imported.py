"""The recipe that a file of settings becomes, of our own or of another system, which the room `importers` reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A recipe, with notes and environment variables if it comes from another system's file."""

    recipe: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Sentences: what is ignored and why, and what differs here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the file sets for its process."""
    system: str = ""
    """Name of the other system; "" for our own files."""

    def over(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return `recipe` overridden by the values of this one."""
        return _merged(recipe, self.recipe)

    def text(self, method: str) -> str:
        """Return the recipe as YAML, with the notes as comments above it."""
        import yaml

        notes = [*self.notes, *(f"export {name}=... (from env)" for name in sorted(self.environment))]
        recipe = {"method": method} | self.recipe
        return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(under))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
