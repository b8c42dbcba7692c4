"""The file of answers: within its budget, evenly over the run, and whole after any crash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit.monitor.samples import Samples, index_of, lines_between, stretches


def groups(count: int, *, size: int = 100) -> tuple[int, Iterator[list[dict[str, Any]]]]:
    return count, ([{"group": number, "completion": "x" * size}] for number in range(count))


def written(path: Path, steps: int, *, budget: int, count: int = 10, begin: int = 0) -> list[int]:
    """The groups that each step of a run recorded."""
    with Samples(path, budget=budget, steps=steps, after=begin) as samples:
        for step in range(begin + 1, steps + 1):
            samples.write(step, {"train": groups(count)})
    found = {one.step: one.groups for one in stretches(path)}
    return [found.get(step, 0) for step in range(1, steps + 1)]


def test_all_is_recorded_where_the_budget_holds_it(tmp_path: Path) -> None:
    assert written(tmp_path / "samples.jsonl", 20, budget=200_000) == [10] * 20


def test_a_long_run_is_thinned_evenly_and_never_beyond_its_budget(tmp_path: Path) -> None:
    """A line has some 150 bytes, so 40,000 bytes hold some 260 of the 1,000 groups: 13 of the first step's share, then
    about 2.5 a step."""
    path = tmp_path / "samples.jsonl"
    found = written(path, 100, budget=40_000)
    assert 39_000 < path.stat().st_size <= 40_000
    assert found[0] == 10
    assert set(found[1:]) <= {2, 3}
    assert [one.of for one in stretches(path)] == [10] * 100


def test_a_group_that_is_larger_than_a_steps_share_is_recorded_every_few_steps(tmp_path: Path) -> None:
    found = written(tmp_path / "samples.jsonl", 100, budget=7_000, count=2)
    assert found[0] == 2 or found[0] == 1
    assert set(found[1:]) == {0, 1}
    halves = sum(found[1:50]), sum(found[50:])
    assert abs(halves[0] - halves[1]) <= 1


def test_validation_has_a_group_in_each_step_that_has_one(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with Samples(path, budget=30_000, steps=100, after=0) as samples:
        for step in range(1, 101):
            kinds = {"validation": groups(5 if step % 10 == 0 else 0), "train": groups(10)}
            samples.write(step, kinds)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["step"] for record in records if record["kind"] == "validation"} == set(range(10, 101, 10))
    assert path.stat().st_size <= 30_000


def test_a_resumed_run_writes_what_the_undisturbed_one_does(tmp_path: Path) -> None:
    full, cut = tmp_path / "full" / "samples.jsonl", tmp_path / "cut" / "samples.jsonl"
    for path in (full, cut):
        path.parent.mkdir()
        written(path, 30, budget=20_000)
    written(cut, 30, budget=20_000, begin=12)
    assert cut.read_bytes() == full.read_bytes()
    assert index_of(cut).read_bytes() == index_of(full).read_bytes()


@pytest.mark.parametrize("torn", [1, 60])
@pytest.mark.parametrize("index", ["whole", "behind", "absent", "torn"])
def test_a_crash_leaves_a_file_that_opens_like_a_finished_one(tmp_path: Path, torn: int, index: str) -> None:
    path = tmp_path / "samples.jsonl"
    written(path, 5, budget=100_000, count=3)
    whole = stretches(path)
    path.write_bytes(path.read_bytes()[:-torn])
    lines = index_of(path).read_bytes().splitlines(keepends=True)
    if index == "absent":
        index_of(path).unlink()
    elif index != "whole":
        index_of(path).write_bytes(b"".join(lines[:2]) + (lines[2][:9] if index == "torn" else b""))
    found = stretches(path)
    assert [(one.step, one.begin) for one in found] == [(one.step, one.begin) for one in whole]
    assert found[:-1] == whole[:-1]
    assert found[-1].answers == 2  # its third line is torn
    steps = [json.loads(line)["step"] for _, line in lines_between(path, found[3].begin)]
    assert steps == [4, 4, 4, 5, 5]
    written(path, 5, budget=100_000, count=3, begin=4)
    assert stretches(path) == whole


def test_without_a_budget_there_is_no_file(tmp_path: Path) -> None:
    assert written(tmp_path / "samples.jsonl", 3, budget=0) == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []
