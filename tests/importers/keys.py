"""Writes docs/keys.md from the tables of the importers.

python tests/importers/keys.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from plaudit.importers.table import KeyTable, table
from plaudit.support.fields import shown

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
START = "<!-- tables -->\n"
TABLES = {
    "TRL 1.16": (table("TRL", "trl"), None),
    "async_rlhf, and TRL before 0.12": (table("async_rlhf", "trl", "async_rlhf"), table("TRL", "trl")),
    "LLM-on-Ray": (table("LLM-on-Ray", "llm_on_ray"), None),
    "DeepSpeed": (table("DeepSpeed", "deepspeed"), None),
}
"""By their title; a second table has rows that are not told again."""


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rows(one: KeyTable, told: KeyTable | None) -> Iterator[tuple[str, str]]:
    """Their keys and what becomes of them."""

    def new(part: str, key: str) -> bool:
        return told is None or vars(told)[part].get(key) != vars(one)[part][key]

    for key, row in one.mapped.items():
        if new("mapped", key):
            by_method = ", ".join(f"`{ours}` ({name})" for name, ours in row.items()) if isinstance(row, dict) else ""
            yield code([key]), by_method or code(one.ours(key)[:1])
    for name, part in one.worked_out.items():
        if new("worked_out", name):
            yield code(list(part["theirs"])), code(part["ours"]) or "checked, sets nothing"
    for why, keys in groupby(one.ignored, one.ignored.__getitem__):
        if named := [key for key in keys if new("ignored", key)]:
            yield code(named), f"ignored: {why}"
    for why, keys in groupby(one.refused, lambda key: one.refused[key][0]):
        if named := [key for key in keys if new("refused", key)]:
            yield ", ".join(passing(key, one.refused[key][1]) for key in named), f"refused: {why}"


def passing(key: str, free: list[object]) -> str:
    """A key with the values that pass."""
    values = [shown(value) for value in free if value not in ("", [], {}) and not isinstance(value, dict)]
    return f"`{key}`" + f" (except {', '.join(values)})" * bool(values)


def page() -> str:
    """The page with its tables as they should be."""
    parts = [PAGE.read_text(encoding="utf-8").partition(START)[0] + START.rstrip()]
    for title, (one, told) in TABLES.items():
        parts += [f"\n## {title}\n", "| there | here |", "|---|---|"]
        parts += [f"| {theirs} | {ours} |".replace("||", "\\|\\|") for theirs, ours in rows(one, told)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
