"""Writes the tables at the end of docs/settings.md from the fields themselves.

python tests/settings/tables.py
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path

from plaudit.algorithms import ALGORITHMS
from plaudit.rewards.settings import RewardSettings
from plaudit.settings.tree import Settings
from plaudit.support.fields import Leaf, leaves, shown

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
START = "## Every setting\n"


def table(title: str, found: list[Leaf]) -> str:
    rows = [f"### {title}\n", "| setting | default | may be | what it does |", "|---|---|---|---|"]
    for leaf in found:
        cells = [f"`{leaf.key}`", f"`{shown(leaf.value)}`" if leaf.value != "" else "", leaf.allowed, leaf.prose]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def tables() -> str:
    """One for the run, one for each section, one for an entry of `rewards`, one for each method."""
    tree = Settings()
    parts = {f.name for f in fields(Settings) if is_dataclass(getattr(tree, f.name))}
    top = [leaf for leaf in leaves(tree) if leaf.key != "algorithm"]
    found = [table("The run", [leaf for leaf in top if "." not in leaf.key])]
    for section, inner in groupby((leaf for leaf in top if "." in leaf.key), lambda leaf: leaf.key.split(".")[0]):
        assert section in parts
        found.append(table(f"`{section}`", list(inner)))
    found.append(table("`rewards`, each entry", list(leaves(RewardSettings))))
    ours = {name: method for name, method in ALGORITHMS.items() if method.__module__.startswith("plaudit.")}
    found += [table(f"`algorithm` of {name}", list(leaves(method))) for name, method in ours.items() if fields(method)]
    return "\n".join(found)


def page() -> str:
    """The page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    told = "Written by `make settings` from the fields of the code.\n"
    return f"{text.partition(START)[0]}{START}\n{told}\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
