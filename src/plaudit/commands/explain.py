"""`plaudit settings`: print settings with their meaning, their allowed values and what a recipe changes.

    method or command -> tree -> leaves, all or those of a key -> a recipe with comments

The output is YAML that loads as a recipe. Torch is not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from plaudit.commands.options import tree_of
from plaudit.support.fields import Leaf, SettingsError, leaves, nearest
from plaudit.support.later import postponed


def explained(name: str, keys: Sequence[str], *, recipe: str | None, plugins: Sequence[str]) -> str:
    """Explain the settings of a method or of a command with a recipe, with the values of `recipe` if it is given.
    Raises SettingsError for an unknown key or method."""
    with postponed("torch"):
        tree, default = _trees(name, recipe, list(plugins))
    from plaudit.settings.tree import annotated

    usual = {leaf.key: leaf.value for leaf in leaves(default)}
    found = [leaf for leaf in leaves(tree) if not keys or any(_named(leaf, key) for key in keys)]
    if lost := next((key for key in keys if not any(_named(leaf, key) for leaf in found)), None):
        from plaudit.settings.spellings import meant

        known = [*usual, *(word for key in usual for word in (key.rpartition(".")[2], key.partition(".")[0]))]
        raise SettingsError(f"there is no setting {lost} of {name}{meant(lost) or nearest(lost, known)}")
    return annotated(found, usual)


def foreign(method: str, recipe: str | None, deepspeed: str | None) -> str | None:
    """Return the recipe, as YAML, that another system's file becomes, or ours with a DeepSpeed configuration over it;
    None for our own file without one."""
    from plaudit.settings.recipes import as_ours

    if recipe is None and deepspeed is None:
        return None
    found = as_ours(recipe, method, deepspeed)
    return found.text(method) if found.system else None


def _named(leaf: Leaf, key: str) -> bool:
    """True if `key` is the leaf's key, a section of it, or its last word."""
    return leaf.key == key or leaf.key.startswith(f"{key}.") or leaf.key.rpartition(".")[2] == key


def _trees(name: str, recipe: str | None, plugins: list[str]) -> tuple[Any, Any]:
    """Return a tree of settings with the values of a recipe, and the same tree with its defaults."""
    from plaudit.evaluate.settings import BeforeAfterSettings
    from plaudit.settings.recipes import defaults, drafted, load_tree, read_yaml
    from plaudit.settings.tree import Settings

    measured: Any = tree_of(name)
    if name == "pipeline":
        from plaudit.runs.pipeline import PipelineSettings, load_pipeline

        default = PipelineSettings(evaluation=BeforeAfterSettings())
        return (default if recipe is None else load_pipeline(recipe)), default
    if measured is not Settings:
        usual = measured(plugins=plugins)
        return (usual if recipe is None else load_tree(measured, read_yaml(recipe))), usual
    default_run = replace(defaults(name), plugins=plugins)
    return (default_run if recipe is None else drafted(recipe, method=name)[0]), default_run


def options(command: click.Command, keys: Sequence[str]) -> str:
    """Explain the options of a command that takes no recipe. Raises SettingsError for an unknown option."""
    shown = [one for one in command.params if isinstance(one, click.Option) and one.name not in ("help", "traceback")]
    names = {key.lstrip("-").replace("-", "_") for key in keys}
    if lost := names - {str(one.name) for one in shown} - {one.opts[0].lstrip("-").replace("-", "_") for one in shown}:
        known = [one.opts[0] for one in shown]
        raise SettingsError(f"there is no option {min(lost)} of {command.name}{nearest(min(lost), known)}")
    lines = []
    for one in shown:
        if names and not names & {str(one.name), one.opts[0].lstrip("-").replace("-", "_")}:
            continue
        choices = f" One of {', '.join(map(str, one.type.choices))}." if isinstance(one.type, click.Choice) else ""
        comment = f"{one.help or ''}{choices}".strip()
        lines += [f"# {comment}"] * bool(comment)
        plain = isinstance(one.default, str | int | float)
        lines.append(f"{one.opts[0]} {one.default if plain else one.type.name}")
    return "\n".join(lines)
