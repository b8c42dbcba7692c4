"""The terminal output of a run: lines that stay, and below them a bar with the remaining time. All lines are also
written to the run's log. Bar, colours and lines that fit the width are for a live terminal: a file gets plain lines, a
notebook a table of the steps."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from plaudit.monitor.figures import FIGURES
from plaudit.monitor.notebook import StepTable, in_notebook
from plaudit.support.visible import rounded, visible

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
    from rich.table import Table
    from rich.text import Text

COLUMNS = {figure.label: figure.form for figure in FIGURES if figure.label}
"""Columns of a step line, and their formats."""
STAMP = "%Y-%m-%d %H:%M:%S"
"""Time format at the start of each line of the log."""
SPARED = ("elapsed", "left", "tok/s", "bubble", "gap", "lag", "length", "kl")
"""Columns of a step line that a narrow terminal does without, in this order. The bar shows the time."""
COLOURS = (
    (r"(?<=trained: )(['\"]).*?\1(?=\.\.\.|$| \| )", "green"),
    (r"^ *problem:", "bold red"),
    (r"^ *(doubt|warning|health):", "yellow"),
)
"""Parts of lines that a terminal colours: trained text of a row, and what asks for attention."""
NEXT_TO_NOTHING = {"lag": 1e-3, "gap": 1e-8}
"""Columns that are hidden below this value: the age of samples, and the gap between sampler and learner."""


class Reporter:
    """Print to the terminal and to a log file; `quiet` keeps the terminal silent."""

    def __init__(self, *, quiet: bool = False):
        from rich.console import Console

        self.console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        self.console.on_broken_pipe = self._unheard  # type: ignore[method-assign]  # rich would end the process
        self._log: Path | None = None
        self._bar: Bar | None = None
        self._steps: StepTable | None = None

    def log_to(self, path: Path) -> None:
        """Append all further output to `path`."""
        self._log = path

    def say(self, text: str) -> None:
        """Print one or more lines that stay."""
        text = visible(text)
        self._record(text)
        self._print(self._shown(text))

    def step(self, line: str) -> None:
        """Print a step's line; a notebook gets a row of its table instead."""
        if self.console.quiet or not in_notebook():
            self.say(line)
            return
        self._record(visible(line))
        self._steps = self._steps or StepTable()
        self._steps.add(line)

    def _shown(self, text: str) -> Any:
        """Return the text; for a terminal, a rich Text with colours and lines that fit its width."""
        if not self.console.is_terminal:
            return text
        from rich.text import Text

        return Text("\n").join(fitted(line, self.console.width) for line in text.split("\n"))

    def show(self, table: Any) -> None:
        """Print a rich table; the log gets it as text."""
        from rich.console import Console

        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                Console(file=file, width=120, markup=False).print(_Visible(table))
        self._print(_Visible(table))

    @contextlib.contextmanager
    def last_words(self) -> Iterator[None]:
        """If the block raises, write the error to the log and raise it again; the caller of the run prints it."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._record(visible(f"the run ended: {str(error) or type(error).__name__}"))
            raise

    def _print(self, what: Any) -> None:
        try:
            self.console.print(what)
        except OSError:  # the terminal is closed, or the disk that `>` writes to is full
            self._unheard()

    def _unheard(self) -> None:
        """Stop printing if the output was closed (`| head`, a closed terminal); the run goes on."""
        if not self.console.quiet:
            self.console.quiet = True
            with contextlib.suppress(OSError, ValueError):  # stdout is not a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
            self._record("standard output is closed: further output is in this log only")

    def _record(self, text: str) -> None:
        if self._log is not None:
            stamp = time.strftime(STAMP)
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{stamp} {line}\n" for line in text.splitlines())

    def track(self, title: str, total: int, *, done: int = 0) -> ProgressBar:
        """Return a bar for `total` units of work, `done` of them finished; use it as a context manager."""
        return ProgressBar(self, title, total, done)

    def _open_bar(self) -> Bar:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        left = (TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *left, console=self.console, transient=True, refresh_per_second=4)
        self._bar.start()
        return self._bar


@dataclass(frozen=True, slots=True)
class _Visible:
    """A table with rich's layout and escaped cells."""

    table: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self.table, options):
            yield Segment(visible(text), style, control)


class ProgressBar:
    """The progress of work with a known number of units; shown as a bar on a terminal only."""

    def __init__(self, reporter: Reporter, title: str, total: int, done: int):
        self.reporter, self.title, self.total, self.done = reporter, visible(title, line=True), total, done
        self.started_at = done
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._clock = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self._clock = time.monotonic()
        if self.reporter.console.is_terminal and not self.reporter.console.quiet:
            self._bar = self.reporter._open_bar()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, by: int = 1) -> None:
        """Count further finished units."""
        self.done += by
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began the work."""
        return time.monotonic() - self._clock

    @property
    def remaining(self) -> float:
        """Estimated seconds for the rest, at the pace so far."""
        fresh = self.done - self.started_at
        return self.elapsed / fresh * (self.total - self.done) if fresh else float("nan")


def step_line(record: Mapping[str, float], bar: ProgressBar) -> str:
    """Return one line for a training step, and a second one for its evaluation if it had one."""
    width = len(str(bar.total))
    parts = [f"step {bar.done:>{width}}/{bar.total}"]
    for label, form in COLUMNS.items():
        value = next((record[one.name] for one in FIGURES if one.label == label and one.name in record), None)
        if value is not None and not abs(value) < NEXT_TO_NOTHING.get(label, 0.0):  # NaN and inf are shown
            parts.append(f"{label} {rounded(value, form)}")
    line = "  ".join([*parts, f"elapsed {clock(bar.elapsed)}", f"left {clock(bar.remaining)}"])
    measured = {name: value for name, value in record.items() if name.startswith("validation/")}
    found = [f"{name.removeprefix('validation/')} {rounded(value, 'z.4f')}" for name, value in measured.items()]
    return "\n".join([line, *(["  ".join(["  evaluation", *found])] if found else [])])


def fitted(line: str, width: int) -> Text:
    """Return a line with colours that fits a terminal's width: a step's line loses columns, any other is broken between
    words. A word that is wider than the terminal stays whole."""
    from rich.text import Text

    if line.startswith("step "):
        columns = line.split("  ")
        for label in SPARED:
            if len("  ".join(columns)) > width:
                columns = [column for column in columns if not column.startswith(f"{label} ")]
        line = "  ".join(columns)
    text = Text(line)
    for pattern, colour in COLOURS:
        text.highlight_regex(pattern, colour)
    if len(line) <= width:
        return text
    indent, begin = " " * (4 + len(line) - len(line.lstrip())), 0
    breaks: list[int] = []
    for word in re.finditer(r"\S+", line):
        if word.end() - begin + len(indent) * bool(breaks) > width and line[begin : word.start()].strip():
            breaks.append(begin := word.start())
    first, *rest = text.divide(breaks)
    for part in (first, *rest):
        part.rstrip()
    return Text("\n").join([first, *(Text(indent) + part for part in rest)])


def of_figures(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a rich table for a terminal. The first cell of a row is its name, the others end at the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def of_texts(title: str, head: Iterable[str], rows: Mapping[str, Iterable[str]], *, lines: bool = False) -> Table:
    """Return a rich table of texts, each row with its name. Control characters are escaped before widths count."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=lines)
    for name in head:
        table.add_column(name, overflow="fold")
    for name, cells in rows.items():
        table.add_row(*(Text(visible(cell).expandtabs()) for cell in (name, *cells)))
    return table


def clock(seconds: float) -> str:
    """Format seconds as 12:34, or 1:02:03 from an hour on; "?" for NaN."""
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
