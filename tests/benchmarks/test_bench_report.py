"""The table's figures, from records written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report
from floor import ratio
from report import cells, markdown, merged, remarks

PEAKS = {"fp32": {"flops": 1e9, "bandwidth": 1e6, "packed": 2e9}}


def side(value: float, *, flops: float = 1e6, read: float = 0.0, loss: float = 2.0, tokens: float = 100.0, **more):  # type: ignore[no-untyped-def]
    figures = {"cpu": 0.5, "peak_mib": 1000.0, "tokens_per_step": tokens, "figures": {"loss": loss}}
    return {"value": value, **figures, "work": {"flops": flops, "bytes": read}, "name": "TRL 1", **more}


def record(ours, theirs, **more):  # type: ignore[no-untyped-def]
    about = {"line": "sft", "title": "SFT", "model": "4M", "precision": "fp32", "threads": 2, "unit": "tok/s"}
    return {**about, "ours": ours, "peers": {"trl": theirs}, **more}


def result(*records):  # type: ignore[no-untyped-def]
    return {"note": "made by hand", "peaks": PEAKS, "records": list(records)}


def test_ratios_and_shares() -> None:
    (row,) = cells(result(record(side(600.0), side(200.0))))
    # The floors are 1e9 / 1e6 = 1,000 tokens a second by torch's own product and 2,000 by the best one.
    assert (row["ours / peer"], row["ours / floors"], row["peer / floors"]) == ("3.00", "60% / 30%", "20% / 10%")
    assert (row["ours"], row["peer's"], row["CPU-s/1k"], row["MiB"]) == ("600", "200", "0.500 / 0.500", "1,000 / 1,000")
    assert row["peer"] == "TRL 1"


def test_reading_can_be_the_floor() -> None:
    (row,) = cells(result(record(side(100.0, read=5e3), side(50.0, read=5e3))))
    assert row["ours / floors"] == "50% / 50%", "5,000 bytes a token at 1e6 a second: 200 tokens a second"


def test_growth_compares_work_not_tokens() -> None:
    """Half the tokens a second, but each is twice the work: nothing was lost."""
    assert ratio(record({}, {}) | {"ours": side(100.0, flops=2e6)}, side(200.0, flops=1e6)) == 1.0


def test_seconds_are_better_when_smaller() -> None:
    one = record({"value": 0.5}, {"value": 2.0, "name": "TRL 1"}, unit="s")
    (row,) = cells(result(one))
    assert (row["ours / peer"], row["ours / floors"]) == ("4.00", "")


def test_what_is_missing_is_said() -> None:
    one = record(side(600.0), {"missing": ".venv-trl is not there"})
    (row,) = cells(result(one))
    assert (row["ours"], row["peer's"], row["ours / peer"]) == ("600", "-", "")
    assert list(remarks(result(one))) == ["SFT 4M fp32, trl: .venv-trl is not there"]
    assert ".venv-trl is not there" in markdown(result(one))


def test_different_work_is_said() -> None:
    assert list(remarks(result(record(side(6.0), side(2.0, loss=2.0004))))) == []
    (doubt,) = remarks(result(record(side(6.0), side(2.0, loss=2.1))))
    assert doubt.endswith("a loss of 2.0000 against 2.1000")
    (doubt,) = remarks(result(record(side(6.0), side(2.0, tokens=90.0))))
    assert doubt.endswith("100.0 tokens a step against 90.0")
    (doubt,) = remarks(result(record(side(6.0), side(2.0, same_tokens=0.9))))
    assert doubt.endswith("90.0% of the greedy tokens are the same")


def test_later_runs_replace_earlier_records() -> None:
    other = record(side(5.0), side(1.0), line="dpo", title="DPO")
    first = result(record(side(600.0), side(200.0)), other)
    second = {
        "note": "later",
        "peaks": {"fp32": {"flops": 2e9, "bandwidth": 1.0}},
        "records": [record(side(900.0), side(200.0))],
    }
    both = merged([first, second])
    assert [(one["line"], one["ours"]["value"]) for one in both["records"]] == [("sft", 900.0), ("dpo", 5.0)]
    assert both["peaks"] == {"fp32": {"flops": 2e9, "bandwidth": 1e6, "packed": 2e9}}, "the best that was seen"
    shares = [row["ours / floors"] for row in cells(both)]
    assert shares == ["45% / 45%", "0% / 0%"], "each beside the peak of its own run: 900 of 2,000, and 5 of 1,000"


@pytest.mark.slow
def test_publishing_replaces_the_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    ours, other = report.BEGIN.format(""), report.BEGIN.format(" small")
    page.write_text(f"before\n{ours}\nold\n{report.END}\nbetween\n{other}\nother\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    made = result(record(side(600.0), side(200.0)), record({"value": 0.5}, {"value": 2.0}, line="start", unit="s"))
    kept, _, chart = report.publish(made)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    line = "| SFT | 4M | fp32 | 2 | tok/s | 600 | 200 | 3.00 |"
    assert line in text.partition("between")[0]
    assert f"{other}\nother\n" in text
    elsewhere, _ = report.publish(made, "small")
    before, between, after = page.read_text().partition("between")
    assert before + between == text.partition("between")[0] + between
    assert "other" not in after
    assert line in after
    assert elsewhere.name.endswith("-small.json")
    page.write_text("marks lost")
    with pytest.raises(ValueError, match="put both back"):
        report.publish(made)
    assert json.loads(kept.read_text()) == made
    assert chart.read_bytes().startswith(b"\x89PNG")
