"""Recognise the system that a settings file is of, and turn the file into a recipe.

file -> `read` -> mapping -> `opened`: an importer for another system's file, then DeepSpeed's configuration -> recipe
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.importers import async_rlhf, deepspeed, llm_on_ray, trl
from plaudit.importers.unread import refuse_unread
from plaudit.settings.files import read
from plaudit.settings.imported import Imported
from plaudit.settings.tree import Settings, SettingsError

OTHERS = (llm_on_ray, async_rlhf, trl)
"""Importers in the order in which they are tried: the first that knows one of the file's keys reads it."""


def opened(
    tree: Mapping[str, Any], method: str | None, deepspeed_config: str | Path | Mapping[str, Any] | None = None
) -> Imported:
    """Return our own recipe unchanged, or another system's file as a recipe; a DeepSpeed configuration overrides it.
    Raises SettingsError with everything that cannot be used."""
    refuse_unread(tree)
    other = next((one for one in OTHERS if one.TELLING & set(tree)), None)
    if other is not None and (ours := sorted(set(vars(Settings())) & set(tree) - {"seed"})):
        raise SettingsError(
            f"the file mixes Plaudit's keys ({', '.join(ours)}) with keys of another system: keep those of one system"
        )
    if (other is not None or deepspeed_config is not None) and method is None:
        raise SettingsError("the file names no method of Plaudit: use `plaudit METHOD FILE`, such as plaudit sft FILE")
    found = Imported(recipe=dict(tree)) if other is None else other.recipe(tree, str(method))
    if deepspeed_config is None:
        return found
    config = deepspeed_config if isinstance(deepspeed_config, Mapping) else read(deepspeed_config)
    over = deepspeed.recipe(config, str(method), found.recipe)
    notes = (*found.notes, *(f"deepspeed: {note}" for note in over.notes))
    system = " and ".join(filter(None, (found.system, over.system)))
    return Imported(recipe=over.over(found.recipe), notes=notes, environment=found.environment, system=system)
