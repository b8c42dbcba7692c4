"""The table, as text and for the docs page, from records: `report.py RESULT.json... [--publish]` shows earlier runs.

Of several files the later one's records replace the earlier ones'. `--publish` keeps the result in benchmarks/results
and writes the table and the chart into docs; with `--machine NAME` it writes the table of another machine there, which
has no chart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chart import draw
from floor import Peak, floors_of, ratio
from harness import ROOT, keep, table
from lines import ASIDE, LINES

PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table{}: written by benchmarks/report.py -->", "<!-- end of table -->"
PROFILE_BEGIN, PROFILE_END = "<!-- profiles: written by benchmarks/bench.py --profile -->", "<!-- end of profiles -->"
LEFT = {"line", "peer"}
CLOSE = 5e-4
"""Relative difference of losses up to which both sides are taken to have done the same."""


def cells(result: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The table's rows: one for each record and peer."""
    for record in result["records"]:
        for peer, theirs in (record["peers"] or {"": {}}).items():
            yield row_of(record, peer, theirs, result["peaks"])


def row_of(record: dict[str, Any], peer: str, theirs: dict[str, Any], peaks: dict[str, Any]) -> dict[str, str]:
    ours = record["ours"]
    found = floors_of(record, peaks, ours, theirs)
    floors = ["" if shares is None else f"{shares[0]:.0%} / {shares[1]:.0%}" for shares in found]
    return {
        "line": record["title"],
        "model": record["model"],
        "precision": record["precision"],
        "threads": str(record["threads"]),
        "unit": record["unit"],
        "ours": number(ours.get("value")),
        "peer's": number(theirs.get("value")),
        "ours / peer": "" if (found := ratio(record, theirs)) is None else f"{found:.2f}",
        "ours / floors": floors[0],
        "peer / floors": floors[1],
        "CPU-s/1k": pair(ours.get("cpu"), theirs.get("cpu"), "{:.3f}"),
        "MiB": pair(ours.get("peak_mib"), theirs.get("peak_mib"), "{:,.0f}"),
        "peer": theirs.get("name") or peer,
    }


def number(value: float | None) -> str:
    """Three digits, or whole numbers where there are more."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pair(a: float | None, b: float | None, form: str) -> str:
    told = ["-" if value is None else form.format(value) for value in (a, b)]
    return "" if a is None and b is None else " / ".join(told)


def remarks(result: dict[str, Any]) -> Iterator[str]:
    """What is missing and why, and where both sides cannot have done the same."""
    for record in result["records"]:
        name = " ".join(part for part in (record["title"], record["model"], record["precision"]) if part)
        ours = record["ours"]
        if "missing" in ours:
            yield f"{name}, ours: {ours['missing']}"
        for peer, theirs in record["peers"].items():
            if "missing" in theirs:
                yield f"{name}, {peer}: {theirs['missing']}"
            elif "missing" not in ours:
                yield from (f"{name}, {peer}: {doubt}" for doubt in doubts(record, ours, theirs))


def doubts(record: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Where figures differ that must be equal: tokens and losses of the same rows in fp32, greedy tokens."""
    same_rows = record["line"] in ("sft", "reward", "dpo", "sft-long", "sft-mixed")
    if same_rows and ours["tokens_per_step"] != theirs["tokens_per_step"]:
        yield f"{ours['tokens_per_step']:,.1f} tokens a step against {theirs['tokens_per_step']:,.1f}"
    losses = [side.get("figures", {}).get("loss") for side in (ours, theirs)]
    if same_rows and None not in losses and record["precision"] == "fp32" and far(losses[0], losses[1]):
        yield f"a loss of {losses[0]:.4f} against {losses[1]:.4f}"
    agreed = theirs.get("same_tokens")
    if agreed is not None and agreed < 1 and record["precision"] == "fp32":
        yield f"{agreed:.1%} of the greedy tokens are the same"


def far(a: float, b: float) -> bool:
    return abs(a - b) > CLOSE * max(abs(a), abs(b))


def markdown(result: dict[str, Any]) -> str:
    rows = list(cells(result))
    told = table([*rows[0]], (row.values() for row in rows), left=LEFT) if rows else ""
    notes = [f"- {remark}" for remark in remarks(result)]
    return "\n".join([told, "", result["note"], *(["", *notes] if notes else []), ""])


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Records of several runs in the order of the table, each with the peak of its own run; the last run's note."""
    records: dict[tuple[str, ...], dict[str, Any]] = {}
    peaks: dict[str, Peak] = {}
    for result in results:
        for record in result["records"]:
            key = (record["line"], record["model"], record["precision"], str(record["threads"]))
            records[key] = {"peak": result["peaks"].get(record["precision"])} | record
        for precision, peak in result["peaks"].items():
            found = Peak(**peak)
            peaks[precision] = found.better(peaks.get(precision, found))
    told = {precision: vars(peak) for precision, peak in peaks.items()}
    order = [*LINES, *ASIDE]
    known = [record for record in records.values() if record["line"] in order]
    known.sort(key=lambda record: order.index(record["line"]))
    return {"note": results[-1]["note"], "peaks": told, "records": known}


def publish(result: dict[str, Any], machine: str | None = None) -> Iterable[Path]:
    """Keep the result beside the code, and write table and chart into docs."""
    name = time.strftime("%Y-%m-%d") + (f"-{machine}" if machine else "")
    kept = RESULTS / f"{name}.json"
    keep(kept, result)
    put(BEGIN.format(f" {machine}" if machine else ""), markdown(result), END)
    if machine:
        return kept, PAGE
    return kept, PAGE, draw(result, ROOT / "docs" / "benchmarks.png")


def put(begin: str, text: str, end: str, *, page: Path | None = None) -> None:
    """Write what stands between two marks of a page. Raises ValueError where it has lost them."""
    page = page or PAGE
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {begin} ... {end}: put both back where the text belongs")
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="result.json of one or more runs")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md and its chart")
    parser.add_argument("--machine", metavar="NAME", help="publish as the table of this machine")
    options = parser.parse_args()
    result = merged([json.loads(path.read_text()) for path in options.results])
    print(markdown(result))
    for path in publish(result, options.machine) if options.publish else ():
        print(path)


if __name__ == "__main__":
    main()
