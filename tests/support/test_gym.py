"""Tasks of reasoning-gym, by the package's own generators and scorers: sources, splits, scores, what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tiny import GPT2
from told import says

from plaudit import SettingsError, run
from plaudit.data.byte_pairs import train_tokenizer
from plaudit.data.fields import DataError
from plaudit.data.read import fetched, read_rows
from plaudit.rewards.rules import function_reward
from plaudit.rewards.settings import RewardSettings
from plaudit.support import gym

SUMS = "reasoning_gym:chain_sum?size=40&max_terms=2&max_digits=2"
needs = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="make test-trackers installs reasoning-gym"
)


def rows(source: str, split: str = "train") -> list[dict[str, Any]]:
    return [row for _, row in read_rows(source, split=split)]


def scored(text: str, row: dict[str, Any], **options: bool) -> float:
    return gym.score(text, row["answer"], row["reasoning_gym"], row["index"], **options)


@needs
def test_a_source_gives_questions_with_their_answers() -> None:
    found = rows(SUMS)
    assert len(found) == 40
    assert not fetched(SUMS)
    for row in found:
        asked = row["prompt"].removeprefix("State the final answer to the following arithmetic problem: ")
        first, sign, second = asked.removesuffix(" =").split()
        assert int(row["answer"]) == int(first) + (int(second) if sign == "+" else -int(second))


@needs
def test_splits_share_no_question_whatever_the_seeds_and_settings() -> None:
    """Of two terms of one digit there are 200 questions: three quarters, an eighth and an eighth of them."""
    few = "reasoning_gym:chain_sum?max_terms=2&max_digits=1"
    train = {row["prompt"] for row in rows(f"{few}&size=400")}
    held_out = [{row["prompt"] for row in rows(f"{few}&size=400&seed=5", split)} for split in ("validation", "test")]
    assert not train & held_out[0]
    assert not train & held_out[1]
    assert not held_out[0] & held_out[1]
    assert len(train | held_out[0] | held_out[1]) == 200
    assert 130 < len(train) < 170


@needs
def test_a_seed_and_a_size_give_other_questions_or_more_of_them() -> None:
    assert rows(SUMS)[:10] == [row | {"reasoning_gym": SUMS} for row in rows(SUMS.replace("40", "10"))]
    assert [row["prompt"] for row in rows(SUMS)] != [row["prompt"] for row in rows(f"{SUMS}&seed=1000")]


@needs
def test_scores_by_hand() -> None:
    (row,) = (row for row in rows(SUMS) if row["prompt"].endswith(": 58 + 26 ="))
    assert row["answer"] == "84"
    assert scored("84", row) == scored(" 84.0\n", row) == 1
    assert scored("83", row) == scored("", row) == 0
    assert scored("It is 84", row) == 2 / 8  # the share of the answer that is the reference
    assert scored("It is 84", row, partial=False) == 0
    assert scored("58 and 26 make <answer> 84 </answer>.", row) == 1  # what is tagged, and nothing else
    assert scored("84 <answer>83</answer>", row) == 0


@needs
def test_a_task_gives_its_own_partial_credit() -> None:
    row = next(row for row in rows("reasoning_gym:spell_backward?max_word_len=4") if len(row["answer"]) == 4)
    wrong = row["answer"][:3] + "?"
    assert scored(row["answer"].upper(), row) == 1
    assert scored(wrong, row) == 0.75
    assert scored(wrong, row, partial=False) == 0


@needs
def test_a_task_whose_questions_have_no_one_answer_is_scored_by_what_it_knows() -> None:
    row = rows("reasoning_gym:graph_color?size=2&num_colors=4")[0]
    assert row["answer"] is None
    assert scored("{}", row) < 1


@needs
@pytest.mark.slow
def test_every_task_that_is_read_scores_its_own_answers_in_another_process() -> None:
    """Another process has other hashes of strings, so it asks something else where the order of a set decides."""
    from reasoning_gym.factory import DATASETS

    read = [task for task in sorted(DATASETS) if task not in gym.REFUSED]
    found = {task: list(islice(gym.questions(f"{gym.PREFIX}{task}?size=3", "train"), 2)) for task in read}
    script = (
        "import json, sys\nfrom plaudit.support import gym\n"
        "for row in json.load(sys.stdin):\n"
        "    print('score', gym.score(row['answer'] or '', row['answer'], row['reasoning_gym'], row['index']))"
    )
    known = [row for task in read for row in found[task]]
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(known), capture_output=True, text=True, check=True
    )
    scores = [float(found[1]) for line in done.stdout.splitlines() if (found := re.search(r"score (\S+)$", line))]
    unlike = {row["reasoning_gym"] for row, got in zip(known, scores, strict=True) if row["answer"] and got < 1}
    assert not unlike


@needs
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("chain_summ", "chain_summ .. did you mean chain_sum?"),
        ("chain_sum?max_term=2", "max_term .. did you mean max_terms?"),
        ("chain_sum?max_terms=1", "max_terms must be >= min_terms"),
        ("chain_sum?max_terms=two", "chain_sum .. TypeError"),
        ("chain_sum?size=0", "size=0 .. from 1"),
        ("chain_sum?seed=x", "seed=x .. from 0"),
        ("chain_sum?max_terms", "max_terms=VALUE"),
        ("chain_sum?max_terms=[", "max_terms=[ .. YAML"),
        ("countdown", "countdown .. Python"),
        ("composite", "composite .. list of sources"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(source: str, words: str) -> None:
    with pytest.raises(DataError) as refused:
        rows(f"reasoning_gym:{source}")
    assert says(refused.value, f"reasoning_gym:{source}: .. {words}")


@needs
def test_other_splits_and_rows_of_another_version_are_refused() -> None:
    with pytest.raises(DataError, match="did you mean test"):
        rows(SUMS, "tset")
    with pytest.raises(ValueError, match="another version"):
        scored("1", rows(SUMS)[0] | {"answer": "0.5"})


def test_without_the_package_sources_and_rewards_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gym.generator.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else there(name))
    with pytest.raises(DataError, match=r"\[reasoning-gym\]"):
        rows(SUMS)
    with pytest.raises(ValueError, match=r"\[reasoning-gym\]"):
        function_reward(RewardSettings(kind="reasoning_gym"))


@needs
@pytest.mark.slow
def test_a_run_trains_on_a_task_and_validates_on_other_questions(tmp_path: Path) -> None:
    train_tokenizer([row["prompt"] + row["answer"] for row in rows(SUMS)], tmp_path / "tokenizer", vocabulary=300)
    settings: dict[str, Any] = {
        "method": "grpo",
        "output": str(tmp_path),
        "name": "sums",
        "model": {"config": GPT2, "tokenizer": str(tmp_path / "tokenizer")},
        "data": {"train": [SUMS], "validation": [SUMS]},
        "rewards": [{"kind": "reasoning_gym"}],
        "rollout": {"prompts_per_step": 2, "max_tokens": 4},
        "train": {"steps": 2},
        "evaluate": {"every": 1},
        "log": {"quiet": True, "page": False},
    }
    done = run(settings)
    read = json.loads((done.folder / "data.json").read_text(encoding="utf-8"))
    assert "trained on too" not in json.dumps(read)
    assert all(0 <= metrics["reward/mean"] <= 1 for metrics in done.metrics if "reward/mean" in metrics)
    lacking = tmp_path / "rows.jsonl"
    lacking.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(SettingsError, match="reasoning_gym"):
        run(settings | {"name": "column", "data": {"train": str(lacking)}})
