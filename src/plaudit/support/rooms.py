"""The optional packages of Plaudit, each with the module that it adds. The others never import one, and work without.

optional("page") -> the module, or None where the package was removed
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

OPTIONAL = {
    "importers": "files",
    "interchange": "reading",
    "page": "keeping",
    "preflight": "choice",
    "servers": "executor",
    "trackers": "opening",
}


def optional(package: str, *, asked_by: str = "") -> Any:
    """Return the module that a package adds, or None if it is absent. Raises ValueError for an absent one that
    `asked_by`, a setting, needs."""
    spec = importlib.util.find_spec(f"plaudit.{package}")
    if spec is not None and spec.origin is not None:  # a folder with only __pycache__ left has no module
        return importlib.import_module(f"plaudit.{package}.{OPTIONAL[package]}")
    if asked_by:
        raise ValueError(f"{asked_by} needs plaudit.{package}, which is not installed: leave it out, or install it")
    return None
