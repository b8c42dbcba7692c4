"""Contenders behind gates take turns, and one that fails does not end the others: real processes, no models."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from contest import Contender, Result, contest

GATE = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import time
from gate import Gate
gate = Gate(steps=2, repeats=2)
print("noise on stdout, which is stderr by now")
for number in range(gate.total):
    with open({diary!r}, "a") as diary:
        diary.write({name!r} + str(number) + " ")
    {act}
    gate.passed(10 + number)
with open({diary!r}, "a") as diary:
    diary.write({name!r} + "end ")
gate.finish(figures={{"loss": 1.5}}, versions={{}})
"""


def entry(folder: Path, name: str, act: str = "pass"):  # type: ignore[no-untyped-def]
    command = [sys.executable, "-c", SCRIPT.format(diary=str(folder / "diary"), name=name, act=act)]
    environment = {"PYTHONPATH": str(GATE)}
    return partial(Contender, command, environment=environment, log=folder / f"{name}.log", deadline=30.0)


def run(*entries):  # type: ignore[no-untyped-def]
    return contest(entries, steps=[2] * len(entries), repeats=2)


def test_segments_take_turns(tmp_path: Path) -> None:
    a, b = run(entry(tmp_path, "a"), entry(tmp_path, "b"))
    diary = (tmp_path / "diary").read_text().split()
    assert sorted(diary[:4]) == ["a0", "a1", "b0", "b1"], "warm-ups overlap"
    assert diary[4:] == "a2 a3 b2 b3 a4 a5 b4 b5 aend bend".split(), "nobody's end overlaps another's segment"
    assert isinstance(a, Result)
    assert isinstance(b, Result)
    assert a.step_tokens == [12.5, 14.5], "without the warm-up's; 12 and 13, then 14 and 15 in two steps"
    assert a.figures == {"loss": 1.5}
    assert a.peak_mib > 1
    assert min(a.rates) > 0
    assert "noise" in (tmp_path / "a.log").read_text()


def test_a_failure_is_told_and_ends_no_other(tmp_path: Path) -> None:
    broken = entry(tmp_path, "x", act="assert number < 3")
    refusing = entry(tmp_path, "r", act="gate.refuse('no bf16 here')")
    good, failed, refused, absent = run(entry(tmp_path, "a"), broken, refusing, "not installed")
    assert isinstance(good, Result)
    assert "ended early" in str(failed)
    assert refused == "no bf16 here"
    assert absent == "not installed"


def test_the_median_is_what_counts() -> None:
    result = Result(rates=[10.0, 1000.0, 12.0], costs=[1.0, 5.0, 2.0], step_tokens=[3.0, 5.0])
    assert (result.rate, result.cost, result.tokens_per_step) == (12.0, 2.0, 4.0)
