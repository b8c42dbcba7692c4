"""Recognise to which system a settings file belongs, and turn the file into a recipe.

file -> `read` -> mapping -> `opened`: an importer for another system's file, then DeepSpeed's configuration -> recipe

A file of a system that cannot be read is refused, with the settings nearest to its keys (`unread.yaml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from plaudit.importers import async_rlhf, deepspeed, llm_on_ray, trl
from plaudit.importers.table import table
from plaudit.settings.files import read
from plaudit.settings.imported import Imported
from plaudit.settings.tree import Settings, SettingsError

OTHERS = (llm_on_ray, async_rlhf, trl)
"""Importers in the order in which they are tried: the first that knows one of the file's keys reads it."""
ENOUGH = 2
"""Number of typical keys from which a file is taken for one of a system that cannot be imported."""


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


def refuse_unread(tree: Mapping[str, Any]) -> None:
    """Raise SettingsError for a file of a system that is not read, with the setting nearest to each of its keys."""
    systems = yaml.safe_load(Path(__file__).with_name("unread.yaml").read_text(encoding="utf-8"))
    matches = {name: len({*tree} & {*one["telling"]}) for name, one in systems.items()}
    system = max(matches, key=lambda name: matches[name])
    if matches[system] < ENOUGH:
        return
    own, of_trl = systems[system]["nearest"], table("TRL", "trl")
    nearest = {key: answer for key in tree if (answer := own.get(key) or ", ".join(of_trl.ours(key)[:1]))}
    lines = "".join(f"\n  - {key}: {answer}" for key, answer in nearest.items())
    others = [key for key in tree if key not in nearest]
    rest = f"\nNo setting is near {', '.join(others)}." if others else ""
    raise SettingsError(
        f"this is a file of {system}, which is not read. Write a recipe of Plaudit with the nearest settings "
        f"(docs/settings.md):{lines}{rest}"
    )
