"""Writes rows as JSON lines: UTF-8, one object a line, the same bytes on every platform."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows, with the folder where it is missing, and return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path
