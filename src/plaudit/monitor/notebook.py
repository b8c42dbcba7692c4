"""A run's steps in a notebook: one table that is updated, instead of a line a step.

a step's line -> its columns -> a row -> the cell's output is replaced
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit.monitor.templates import rendered

ROWS = 100
"""Rows that the table shows, the last ones."""


STEPS = Path(__file__).parent / "steps.html.jinja"


class StepTable:
    """The steps of one run. The first row displays the table, and later rows replace it."""

    def __init__(self) -> None:
        self.columns: list[str] = []
        self.rows: list[dict[str, str]] = []
        self._handle: Any = None

    def add(self, line: str) -> None:
        """Add a step's line, or lines: `step  3/10  loss 0.5`, and its evaluation below it."""
        step, *evaluation = line.split("\n")
        row = dict(_pairs(re.sub("^step +", "step ", step)))
        for more in evaluation:
            row |= {f"evaluation {label}": value for label, value in _pairs(more.strip().removeprefix("evaluation"))}
        self.columns += [label for label in row if label not in self.columns]
        self.rows.append(row)
        self._show()

    def html(self) -> str:
        """Return the table as HTML: the column heads and the last rows."""
        return rendered(STEPS, columns=self.columns, rows=self.rows[-ROWS:], hidden=len(self.rows) - ROWS)

    def _show(self) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(self.html()), display_id=True)
        else:
            self._handle.update(HTML(self.html()))


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    """Yield the columns of a line as (label, value)."""
    for cell in re.split(" {2,}", line.strip()):
        label, _, value = cell.rpartition(" ")
        yield label, value


def in_notebook() -> bool:
    """True if this process answers a notebook's cells."""
    library: Any = sys.modules.get("IPython")
    shell = None if library is None else library.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"
