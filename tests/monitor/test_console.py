"""What a person sees: the line of a step, the bar of a terminal, the log."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from foul import ESCAPES, XSS
from rich.table import Table

from plaudit.monitor.console import ProgressBar, Reporter, clock, fitted, step_line
from plaudit.monitor.notebook import StepTable


def test_age_and_gap_of_samples_are_shown_where_there_are_any() -> None:
    with Reporter(quiet=True).track("grpo", 4, done=0) as tracker:
        tracker.advance()
        fresh = step_line({"loss/policy": 0.5, "lag/mean": 0.0, "kl/sampler": 1e-14}, tracker)
        old = step_line({"loss/policy": 0.5, "lag/mean": 0.75, "kl/sampler": 2e-3}, tracker)
    assert "loss 0.5000" in fresh
    assert "lag" not in fresh
    assert "gap" not in fresh
    assert "lag 0.75  gap 2.0e-03" in old


def test_what_rounds_to_nothing_has_no_sign() -> None:
    record = {"loss/policy": -1e-9, "reward/mean": -1e-9, "kl/reference": -1e-7, "validation/margin": -1e-9}
    with Reporter(quiet=True).track("reinforce", 4) as tracker:
        line, evaluation = step_line(record, tracker).split("\n")
    assert "loss 0.0000  reward +0.000  kl 0.00  elapsed" in line
    assert evaluation == "  evaluation  margin 0.0000"


def test_a_step_takes_one_line_of_a_narrow_terminal_and_no_word_is_split() -> None:
    whole = "step  50/100  loss 0.5123  reward +0.123  gold +0.300  kl 0.12  length 31.5"
    fit, whole = whole, f"{whole}  tok/s 12,345  elapsed 1:02  left 3:04"
    assert fitted(whole, 200).plain == whole
    assert fitted(whole, 80).plain == fit
    assert fitted(whole, 60).plain == "step  50/100  loss 0.5123  reward +0.123  gold +0.300"
    path = "/a/path/that/is/wider/than/the/terminal"
    lines = fitted(f"  warning: see {path} and then the long-winded rest", 24).plain.split("\n")
    assert lines == ["  warning: see", f"      {path}", "      and then the", "      long-winded rest"]


def test_a_terminal_colours_what_is_trained_and_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = r"""  f: a row: 'Two?\n' | trained: " It's four.<eos>"... | 'more' | trained: 'b'"""
    for terminal in (False, True):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
        monkeypatch.setenv("COLUMNS", "120")
        Reporter().say(f"{line}\n  problem: x\x1b[2J")
        written = capsys.readouterr().out
        assert "\x1b[2J" not in written
        coloured = re.findall(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", written)
        told = [("32", '" It\'s four.<eos>"'), ("32", "'b'"), ("1;31", "  problem:")]
        assert coloured == (told if terminal else [])
    narrow = fitted(line, 30)
    green = "".join(narrow.plain[span.start : span.end] for span in narrow.spans if span.style == "green")
    assert "".join(green.split()) == """"It'sfour.<eos>"'b'""", "where the text goes on in another line, too"


def test_a_figure_that_is_not_finite_is_shown() -> None:
    with Reporter(quiet=True).track("sft", 4) as tracker:
        line = step_line({"loss/policy": float("nan"), "kl/sampler": float("inf")}, tracker)
    assert "loss nan  gap inf  " in line


def test_what_is_left_goes_by_the_pace_of_this_sitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressBar, "elapsed", 30.0)
    with Reporter(quiet=True).track("sft", 10, done=4) as tracker:
        assert step_line({}, tracker) == "step  4/10  elapsed 0:30  left ?"
        tracker.advance(2)  # in 30 seconds: the other four take twice as long
        assert step_line({}, tracker) == "step  6/10  elapsed 0:30  left 1:00"


def test_clocks_by_hand() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 61, 3599.4, 3600, 36610)] == [
        *("0:00", "1:00", "1:01", "59:59", "1:00:00", "10:10:10")
    ]


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_has_a_bar_under_lines_that_stay_as_they_are(
    terminal: bool, quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    reporter, line = Reporter(quiet=quiet), f"[bold]1[/bold] {'word ' * 60}end"
    reporter.log_to(tmp_path / "log.txt")
    with reporter.track("grpo", 8, done=2) as tracker:
        tracker.advance(3)
        reporter.say(f"{line}\nand more")
    written = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "")
    shown = fitted(line, reporter.console.width).plain if terminal else line
    assert (f"{shown}\nand more\n" in plain) is not quiet
    assert shown.split() == line.split()
    assert [("2/8" in plain), ("5/8" in plain)] == 2 * [terminal and not quiet]
    assert written.endswith("\x1b[2K") is (terminal and not quiet)  # the bar is gone
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", said) for said in log] == [line, "and more"]


def test_a_table_stands_in_the_log_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter, table = Reporter(), Table("Größe")
    table.add_row("3")
    reporter.show(table)
    reporter.log_to(tmp_path / "log.txt")
    reporter.show(table)
    assert capsys.readouterr().out.count("Größe") == 2
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").count("Größe") == 1


class Tags(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


@pytest.mark.slow
def test_what_a_model_writes_is_text_on_a_terminal_in_a_log_and_in_a_notebook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter, rows = Reporter(), StepTable()
    reporter.log_to(tmp_path / "log.txt")
    rows._show = lambda: None  # type: ignore[method-assign]  # there is no notebook here
    for text in (*XSS, *ESCAPES):
        table = Table(text)
        table.add_row(text)
        reporter.say(f"answer: {text}")
        reporter.show(table)
        rows.add(f"step 1/2  {text} 1")
    told = capsys.readouterr().out + (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert told.count(XSS[0]) >= 4
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\u2028\ufeff]", told + rows.html())
    assert Tags(rows.html()).seen == {"table", "thead", "tbody", "caption", "tr", "th", "td"}
