"""The HTML that we write, as Jinja templates of `web/`. Whatever is put into one is escaped, and made visible."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.support.visible import visible

if TYPE_CHECKING:
    from jinja2 import Environment

WEB = Path(__file__).parent / "web"


def rendered(name: str, **values: Any) -> str:
    """Return the text of a template, `NAME.html.jinja`."""
    return _templates().get_template(f"{name}.html.jinja").render(values)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(WEB),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
