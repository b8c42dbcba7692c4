"""Render Plaudit's HTML pages from Jinja templates. Inserted values are escaped, control characters made visible."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.support.visible import visible

if TYPE_CHECKING:
    from jinja2 import Environment


def rendered(template: Path, **values: Any) -> str:
    """Return the text of a template's file."""
    return _templates(template.parent).get_template(template.name).render(values)


@cache
def _templates(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
