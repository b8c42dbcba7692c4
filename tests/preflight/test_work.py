"""What a step asks for: amounts, decoding and shares, worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plaudit.preflight.work import Amounts, Work, amounts, decoding, work_of
from plaudit.settings.recipes import read_settings


def test_a_prompt_counts_once_for_its_answers() -> None:
    """A prompt of 10 tokens with answers of 2 and 3, another of 4 with one of 6: rows of 12, 13 and 10."""
    found = amounts([(10, (2, 3)), (4, (6,))])
    assert found == Amounts(1, 10 + 5 + 4 + 6, 12**2 + 13**2 + 10**2, 2 + 3 + 6)
    assert found.cut(10).passes == 3
    assert found.times(2).cut(10).passes == 5


def test_decoding_refills_slots() -> None:
    """Two slots, answers of 1, 3 and 2 tokens after prompts of 10: the third takes the first's place after a step.
    Three steps with two rows each; contexts 10 + 10, 11 + 10, 12 + 11."""
    asked: list[tuple[float, ...]] = []
    shapes = [(10, (1,)), (10, (3,)), (10, (2,))]
    assert decoding(shapes, 2, lambda *numbers: asked.append(numbers) or 1.0) == 2
    assert asked == [(1, 2, 20, 20), (2, 4, 21 + 23, 10)]


def test_answers_to_a_prompt_share_its_pass() -> None:
    assert decoding([(7, (2, 2, 2))], 2, lambda steps, rows, context, prompts: prompts) == 7


def work(**changes: Any) -> Work:
    shapes = ((10, (4,)), (10, (1,)), (10, (2,)), (10, (3,)))
    given: dict[str, Any] = {"sampled": shapes, "learned": shapes, "scale": 1.0, "scored": (), "trained": ("policy",)}
    return Work(**given, updates=(1, 1), micro=100, score=200, **changes)


def test_ranks_get_whole_prompts_and_the_busiest_counts() -> None:
    """14, 13, 12 and 11 tokens on two ranks: 14 + 11 and 13 + 12."""
    assert work().share(1).tokens == 50
    assert work().share(2).tokens == 25
    assert work().share(3).tokens == 23
    assert work().share(8).tokens == 14


def test_workers_answer_their_part_of_the_prompts() -> None:
    batches, times = work().batches(2)
    assert ([len(one) for one in batches], times) == ([2, 2], 1.0)
    assert work().batches(8)[0] == [(shape,) for shape in work().sampled]


@pytest.mark.parametrize(
    ("method", "answers", "rows"), [("ppo", 1, 1), ("grpo", 8, 8), ("remax", 2, 1), ("online-dpo", 8, 2)]
)
def test_each_method_asks_for_its_own_answers_and_rows(method: str, answers: int, rows: int) -> None:
    words = ["rollout.prompts_per_step=4", "rollout.max_tokens=16", "model.path=x"]
    words += ["algorithm.samples=8"] if method in ("grpo", "online-dpo") else []
    found = work_of(read_settings(None, words, method=method), [5, 7], [], ())
    assert len(found.sampled) == 4
    assert [drawn for _, drawn in found.sampled] == [(16,) * answers] * 4
    assert {len(kept) for _, kept in found.learned} == {rows}
    assert found.answers == 4 * answers


def test_an_offline_method_draws_its_rows(tmp_path: Path) -> None:
    settings = read_settings(None, ["train.batch_size=6", "model.path=x"], method="dpo")
    found = work_of(settings, [], [], [(5, (3, 4))])
    assert found.sampled == ()
    assert found.learned == ((5, (3, 4)),) * 6
    assert found.scored == ("reference",)


def test_of_many_prompts_some_stand_for_all() -> None:
    settings = read_settings(None, ["rollout.prompts_per_step=4096", "model.path=x"], method="ppo")
    found = work_of(settings, [5], [10], ())
    assert len(found.sampled) == 512
    assert found.answers == 4096
    assert found.share(1).tokens == 4096 * 15
    assert found.share(1024).tokens == 4 * 15
    assert found.batches(2) == ([found.sampled], 4.0)
