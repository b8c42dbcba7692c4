"""Relabelled preferences, pairs made of answers, and training on both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plaudit.data.load import load_preferences
from plaudit.data.settings import DataSettings
from plaudit.evaluate.judge import Judge
from plaudit.evaluate.settings import RelabelSettings
from plaudit.evaluate.statistics import share_interval
from plaudit.monitor.sinks import read_jsonl
from plaudit.relabel import relabel
from plaudit.support.fields import SettingsError
from plaudit.tasks.demo import gold

if TYPE_CHECKING:
    from conftest import Task

GOLD = "plaudit.tasks.demo:gold_reward"
LENGTH = "def longer(completion):\n    return None if completion == 'x' else float(len(completion))\n"
Write = Callable[[str, Any], str]


def settings(tmp_path: Path, **changes: Any) -> RelabelSettings:
    return RelabelSettings(**{"output": str(tmp_path / "out" / "gold.jsonl"), "device": "cpu", **changes})


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def test_pairs_are_ordered_counted_and_keep_their_columns(tmp_path: Path, write: Write) -> None:
    rows = [
        pair("p", "long", "no", source="a"),  # agrees, by 2
        pair("q", "no", "longest", margin=3.0),  # swapped, by 5
        pair("r", "same", "size"),  # a tie
        pair("s", "x", "none"),  # the first one has no score
    ]
    by = f"{write('rule.py', LENGTH)}:longer"
    result = relabel(settings(tmp_path, preferences=write("pairs.jsonl", rows), gold=by))
    assert read_jsonl(tmp_path / "out" / "gold.jsonl") == [
        pair("p", "long", "no", chosen_score=4.0, rejected_score=2.0, agrees=True, source="a"),
        pair("q", "longest", "no", chosen_score=7.0, rejected_score=2.0, agrees=False),
    ]
    assert (result.rows, result.pairs, result.written) == (4, 4, 2)
    assert (result.swapped, result.ties, result.unscored, result.reasons) == (1, 1, 1, ("not applicable",))
    assert result.figures["agreement"] == share_interval([1.0, 0.5, 0.0])
    assert result.figures["margin"].value == pytest.approx((2 - 5 + 0) / 3)
    report = json.loads((tmp_path / "out" / "gold.report.json").read_text())
    assert report["figures"]["agreement"]["value"] == 0.5
    assert report["swapped"] == 1


def test_ties_can_be_kept_and_be_wider(tmp_path: Path, write: Write) -> None:
    source = write("pairs.jsonl", [pair("p", "aa", "bbb"), pair("q", "aa", "bbbb")])
    by = f"{write('rule.py', LENGTH)}:longer"
    result = relabel(settings(tmp_path, preferences=source, gold=by, ties="keep", tie=1.0))
    rows = read_jsonl(tmp_path / "out" / "gold.jsonl")
    assert [(row["chosen"], row["agrees"]) for row in rows] == [("aa", True), ("bbbb", False)]
    assert result.ties == 1


def test_every_dialect_is_read_and_a_chats_turns_are_kept(tmp_path: Path, write: Write) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "?"}]
    answers = [[*chat, {"role": "assistant", "content": text}] for text in ("a", "bb")]
    rows = [
        {"chosen": answers[0], "rejected": answers[1]},
        {"prompt": "p", "pos_answers": ["a", "bb"], "neg_answers": ["bb", "ccc"]},
        {"instruction": "do", "input": "it", "output_1": "a", "output_2": "bb", "preference": 1},
    ]
    by = f"{write('rule.py', LENGTH)}:longer"
    result = relabel(settings(tmp_path, preferences=write("mixed.jsonl", rows), gold=by))
    written = read_jsonl(tmp_path / "out" / "gold.jsonl")
    assert [row["prompt"] for row in written] == [chat, "p", "p", "do\n\nit"]
    assert [row["chosen"] for row in written] == ["bb", "bb", "ccc", "bb"]
    assert result.figures["agreement"].count == 3, "pairs of one prompt are one observation"


def test_answers_become_pairs_of_extremes_or_all(tmp_path: Path, write: Write) -> None:
    texts = ["aa", "x", "bbbb", "c", "aa"]
    rows = [{"prompt": "p", "completion": text} for text in texts] + [{"prompt": "q", "completion": "alone"}]
    source, by = write("answers.jsonl", rows), f"{write('rule.py', LENGTH)}:longer"
    relabel(settings(tmp_path, answers=source, gold=by))
    file = tmp_path / "out" / "gold.jsonl"
    assert read_jsonl(file) == [pair("p", "bbbb", "c", chosen_score=4.0, rejected_score=1.0)]
    result = relabel(settings(tmp_path, answers=source, gold=by, pairs="all", overwrite=True))
    assert [(row["chosen"], row["rejected"]) for row in read_jsonl(file)] == [
        ("bbbb", "aa"),
        ("bbbb", "c"),
        ("aa", "c"),
    ]
    assert result.figures == {}


def test_a_judge_scores_texts_as_it_scores_rows_in_training(task: Task, tmp_path: Path) -> None:
    source = str(task.files.preferences_validation)
    relabel(settings(tmp_path, preferences=source, judge=task.judge))
    judge = Judge.load(task.judge)
    data = load_preferences(
        DataSettings(train=source, shuffle=False, max_pairs_per_prompt=99), judge.tokenizer, 0, judge.model.special.eos
    )
    expected = judge.of_sequences([row.tokens for item in data.items for row in item])
    found = [sorted((row["chosen_score"], row["rejected_score"])) for row in read_jsonl(tmp_path / "out/gold.jsonl")]
    pairs = [sorted(both) for both in zip(expected[::2], expected[1::2], strict=True)]
    assert sorted(found) == [pytest.approx(both, abs=1e-5) for both in sorted(pairs)]


@pytest.mark.parametrize("method", ["reward", "dpo"])
def test_a_run_trains_on_what_gold_has_labelled(method: str, task: Task, make_recipe: Any, tmp_path: Path) -> None:
    from plaudit import load_settings, run

    relabel(settings(tmp_path, preferences=str(task.files.preferences), gold=GOLD))
    rows = read_jsonl(tmp_path / "out/gold.jsonl")
    assert all(gold(row["prompt"], row["chosen"]) > gold(row["prompt"], row["rejected"]) for row in rows)
    assert {row["agrees"] for row in rows} == {True, False}
    recipe = make_recipe(method, tmp_path, data={"train": str(tmp_path / "out/gold.jsonl")}, train={"steps": 2})
    done = run(load_settings(recipe))
    report = json.loads((done.folder / "data.json").read_text())["sources"][0]
    assert (report["read"], report["dialects"]) == (len(rows), {"prompt/chosen/rejected": len(rows)})
    assert len(done.metrics) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gold": None}, "name one measure"),
        ({"judge": "x"}, "name one measure"),
        ({"answers": "x.jsonl"}, "preferences and answers"),
        ({"output": "x.parquet"}, r"output=x\.parquet .*jsonl"),
        ({"preferences": "absent.jsonl"}, "no absent.jsonl"),
        ({"preferences": None, "answers": "HERE", "ties": "keep"}, "ties=keep"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], told: str, tmp_path: Path, write: Write) -> None:
    source = write("pairs.jsonl", [pair("p", "a", "b")])
    given = {name: source if value == "HERE" else value for name, value in changes.items()}
    with pytest.raises(SettingsError, match=told):
        relabel(settings(tmp_path, **{"preferences": source, "gold": GOLD, **given}))


def test_nothing_is_written_over_and_rules_of_tokens_are_refused(tmp_path: Path, write: Write) -> None:
    source = write("pairs.jsonl", [pair("p", "a", "b")])
    taken = write("taken.jsonl", "kept\n")
    with pytest.raises(SettingsError, match="exists already"):
        relabel(settings(tmp_path, preferences=source, gold=GOLD, output=taken))
    from plaudit.rewards.settings import RewardSettings

    rule = RewardSettings(kind="length", options={"target": 3})
    with pytest.raises(ValueError, match="answer's tokens"):
        relabel(settings(tmp_path, preferences=source, rewards=[rule]))
    rule_of_columns = write("columns.py", "def rule(completion, levle):\n    return 0.0\n")
    with pytest.raises(ValueError, match="'levle'"):
        relabel(settings(tmp_path, preferences=source, gold=f"{rule_of_columns}:rule"))
    with pytest.raises(ValueError, match=r" 1 rows: 1 ties, 0 "):
        relabel(settings(tmp_path, preferences=source, gold=f"{write('rule.py', LENGTH)}:longer"))


@pytest.mark.slow
def test_answers_of_generate_are_relabelled_by_the_command(task: Task, tmp_path: Path, write: Write) -> None:
    """The whole way: sampled answers with their references, a rule that compares, pairs."""
    from click.testing import CliRunner

    from plaudit.commands.cli import main

    rows = [{"prompt": [{"role": "user", "content": "The plot"}]}, {"prompt": "The acting", "answer": "4."}]
    rule = write("rule.py", "def rule(completion, answer):\n    return len(completion) - 100 * (answer == '4.')\n")
    model = shutil.copytree(task.first, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for turn in messages %}<{{ turn.content }}>{% endfor %}")
    words = [
        [
            "generate",
            str(model),
            f"prompts={write('asked.jsonl', rows)}",
            "sampling.samples=4",
            "sampling.max_tokens=12",
        ],
        ["relabel", f"answers={tmp_path}/answers.jsonl", f"gold={rule}:rule", f"output={tmp_path}/gold.jsonl"],
    ]
    words[0] += [f"output={tmp_path}/answers.jsonl"]
    for command in words:
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    written = read_jsonl(tmp_path / "gold.jsonl")
    assert [row["prompt"] for row in written] == [rows[0]["prompt"], "The acting"]
    assert written[0]["chosen_score"] == len(written[0]["chosen"]) > written[0]["rejected_score"]
    assert written[1]["chosen_score"] == len(written[1]["chosen"]) - 100
    assert "Relabelled" in done.output
    again = CliRunner().invoke(main, words[1])
    assert (again.exit_code, "exists already" in again.output) == (2, True)
