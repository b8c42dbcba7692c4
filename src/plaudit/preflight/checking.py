"""`plaudit check`: print what is wrong or doubtful about a recipe, for people or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plaudit.data.report import row_line
from plaudit.monitor.console import Reporter
from plaudit.settings.recipes import recipe_of
from plaudit.support.later import postponed

with postponed("torch"):
    from plaudit.preflight.check import ROWS, Preflight, preflights


def check(method: str | None, words: Sequence[str], *, as_json: bool, began: float) -> int:
    """Check `[RECIPE] key=value ...`, print the findings, and return the number of problems. `began` is the time at
    which the command started."""
    found = preflights(*recipe_of(words), method=method)
    seconds = time.time() - began
    problems = sum(finding.problem for one in found for finding in one.findings)
    if as_json:
        print(json.dumps({"ok": not problems, "seconds": round(seconds, 2), "runs": [plain(one) for one in found]}))
        return problems
    reporter = Reporter()
    for one in found:
        for line in lines(one):
            reporter.say(line)
    doubts = sum(len(one.findings) for one in found) - problems
    reporter.say(f"{_count(problems, 'problem')}, {_count(doubts, 'doubt')}, in {seconds:.1f} s")
    return problems


def plain(one: Preflight) -> dict[str, Any]:
    """Return a preflight as values for JSON."""
    return {
        "stage": one.stage,
        "method": None if one.settings is None else one.settings.method,
        "problems": [{"key": f.key, "text": f.text} for f in one.findings if f.problem],
        "doubts": [{"key": f.key, "text": f.text} for f in one.findings if not f.problem],
        "needs": one.needs,
        "here": one.here,
        "sources": [
            {
                "source": preview.report.source,
                "role": preview.report.role,
                "read": preview.report.read,
                "dialects": dict(preview.report.dialects),
                "rows": [
                    [[{"text": text, "trained": trained} for text, trained in row] for row in item]
                    for item in preview.rows
                ],
            }
            for preview in one.previews
        ],
        "episode": one.episode,
    }


def lines(one: Preflight) -> Iterator[str]:
    """Yield a preflight's lines for a terminal: rows, sizes, doubts; problems last, so that they are seen first."""
    if one.settings is not None:
        stage = f"stage {one.stage}: " if one.stage else ""
        yield f"{stage}{one.settings.method}, run {Path(one.settings.output, one.settings.name or '...')}"
    for preview in one.previews:
        report = preview.report
        read = ", ".join(f"{count} as {name}" for name, count in report.dialects.items())
        whole = report.read < ROWS and not preview.problem and one.settings is not None and not one.settings.data.limit
        which = f"{'all' if whole else 'the first'} {report.read} rows, {read or 'none of them read'}"
        yield f"  {report.source} ({report.role}): {which if report.read else 'no rows'}"
        for item in preview.rows:
            yield from (f"    {'or ' if number else ''}{row_line(row)}" for number, row in enumerate(item))
    if one.episode:
        yield "  an episode of the first prompt, whose turns no model wrote:"
        yield from (f"    {line}" for line in one.episode)
    if one.needs:
        sizes = ", ".join(f"{part} {size / 2**30:.1f} GiB" for part, size in one.needs.items() if part != "parameters")
        yield f"  {one.needs['parameters'] / 1e6:,.1f} M parameters; full passes and checkpoints take {sizes}"
    yield from (f"  {problem}" for problem in one.here)
    for finding in sorted(one.findings, key=lambda finding: finding.problem):
        key = "" if finding.key in finding.text else f"{finding.key}: "
        yield f"  {'problem' if finding.problem else 'doubt'}: {key}{finding.text}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
