"""Sums told in words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plaudit.tasks.stories import brief, make_stories, right


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Anna has 12 apples now.", 1.0),
        ("7 + 5 = 12", 1.0),
        ("12 are left, not 7.", 0.0),
        ("Anna has 112 apples.", 0.0),
        ("Anna has twelve apples.", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_right_by_its_last_number(answer: str, value: float) -> None:
    assert right(answer, "12") == value


@pytest.mark.parametrize(
    ("answer", "finished", "value"),
    [
        ("Anna has 12 apples now.", True, 1.0),
        ("Anna has 12 apples", True, 1.0),
        ("Anna has 12 apples now.", False, 0.0),
        ("Anna has 12 apples. She is glad.", True, 0.0),
        ("7 + 5:\n12", True, 0.0),
        ("Anna has some apples.", True, 0.0),
    ],
)
def test_a_brief_answer_is_one_sentence_with_a_number(answer: str, finished: bool, value: float) -> None:
    assert brief(answer, finished) == value


def test_every_answer_is_the_sum_and_no_question_of_the_test_is_trained(tmp_path: Path) -> None:
    files = make_stories(tmp_path, seed=1, train=300, test=50)
    parts = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in (files.prompts, files.prompts_test)
    ]
    assert list(map(len, parts)) == [300, 50]
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in parts]
    assert not asked[0] & asked[1]
    for row in parts[0] + parts[1]:
        question = row["prompt"][0]["content"]
        a, b = map(int, re.findall(r"\d+", question))
        more = "buys" in question or "adds" in question
        assert int(row["answer"]) == (a + b if more else a - b) > 0
    again = make_stories(tmp_path / "again", seed=1, train=300, test=50)
    assert again.prompts.read_bytes() == files.prompts.read_bytes()
