"""When a side of the race has arrived, and how its files are followed."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from contest import watched
from race import BOTH, METHODS, Course, Tail, answers_a_step, pipeline, table
from race_pretrained import Pretrained
from task import read_rows

from plaudit.commands.demo import placed
from plaudit.preflight.check import preflights
from plaudit.tasks.demo import DemoFiles


def test_the_mark_is_passed_by_the_mean_of_the_last_256_answers() -> None:
    course = Course()
    golds = [0.9, 0.2, 0.6, 0.6, 0.9]
    passed = [course.saw(float(second), gold, answers=64, mark=0.6) for second, gold in enumerate(golds)]
    # Means of four steps: 0.575 after the fourth, 0.575 after the fifth.
    assert passed == [False] * 5
    assert course.saw(5.0, 0.3, answers=64, mark=0.6), "0.6, 0.6, 0.9 and 0.3 are 0.6 on average"
    assert course.ends == {"gold": 5.0}


def test_larger_steps_need_fewer() -> None:
    course = Course()
    assert not course.saw(1.0, 0.9, answers=128, mark=0.6)
    assert course.saw(2.0, 0.4, answers=128, mark=0.6)


def test_a_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "lines.jsonl")
    assert list(tail.new()) == []
    tail.path.write_text('{"gold": 1}\n{"go')
    assert list(tail.new()) == [{"gold": 1}]
    with tail.path.open("a") as file:
        file.write('ld": 2}\n')
    assert list(tail.new()) == [{"gold": 2}]
    assert list(tail.new()) == []


def test_a_side_that_ends_early_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('done')"]
    failure = watched(command, {}, tmp_path / "log", lambda seconds: False, 30.0)
    assert failure == f"it ended (status 0) before the mark; its output is in {tmp_path / 'log'}"


def test_a_side_is_stopped_when_it_arrives(tmp_path: Path) -> None:
    course = Course()

    def look(seconds: float) -> bool:
        return course.saw(seconds, 1.0, answers=256, mark=0.6)

    assert watched([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log", look, 30.0) == ""
    assert course.ends["gold"] < 30


def test_the_table_compares_the_times_to_the_mark() -> None:
    first = {
        "ours": Course({"sft": 20.0, "gold": 100.0}, [(100.0, 0.61)]),
        "trl": Course({"gold": 350.0}, [(350.0, 0.6)]),
    }
    lost = {"ours": Course({"gold": 50.0}, [(50.0, 0.7)]), "trl": Course(failure="it ended")}
    third = {"ours": Course({"gold": 100.0}, [(100.0, 0.61)]), "trl": Course({"gold": 250.0}, [(250.0, 0.6)])}
    assert table([first, lost, third]).splitlines() == [
        "| seed | side | SFT done | gold reached | last gold | times as fast |",
        "|---|---:|---:|---:|---:|---:|",
        "| 0 | ours | 20 | 100 | 0.61 |  |",
        "| 0 | trl | - | 350 | 0.60 | 3.50 |",
        "| 1 | ours | - | 50 | 0.70 |  |",
        "| 1 | trl | - | - | - |  |",
        "| 2 | ours | - | 100 | 0.61 |  |",
        "| 2 | trl | - | 250 | 0.60 | 2.50 |",
        "| mean |  |  |  |  | 3.00 |",
    ]


def test_the_table_of_a_pretrained_model_has_rates_and_memory() -> None:
    ours, theirs = Course({"gold": 100.0}, [(100.0, 0.61)], 400.0, 1500.0), Course({}, [(90.0, 0.3)], 100.0, 3000.0)
    assert table([{"ours": ours, "trl": theirs}]).splitlines()[0::2] == [
        "| seed | side | gold reached | last gold | tok/s | MiB | times as fast |",
        "| 0 | ours | 100 | 0.61 | 400 | 1,500 |  |",
    ]


def test_both_sides_of_a_pretrained_model_get_the_demos_settings(tmp_path: Path) -> None:
    options = Namespace(threads=1, prompts=16, model=tmp_path / "model")
    race = Pretrained("pretrained", 3, tmp_path, options)
    ours, theirs = race.task("ours"), race.task("trl")
    assert Path(ours.data).read_text() == Path(theirs.data).read_text()
    assert replace(ours, weights="", data="", output="") == replace(theirs, weights="", data="", output="")
    assert (ours.rows, ours.samples, ours.max_new_tokens, ours.learning_rate, ours.lora) == (128, 8, 32, 5e-4, 16)
    assert [one["function"].partition(":")[2] for one in ours.rewards] == ["right", "brief"]
    assert ours.needed <= len(rows := read_rows(ours.data))
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert ours.path("policy").readlink() == options.model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_the_recipe_of_each_method_is_a_pipeline(method: str, demo: DemoFiles, tmp_path: Path) -> None:
    """Its settings are those that Plaudit knows, on the model of both sides."""
    stages = placed(yaml.safe_load(pipeline(method)), demo.sft.parent) | {"name": "seed0", "output": str(tmp_path)}
    found = preflights(stages, [], method=None)
    assert [one.stage for one in found][-1] == method
    assert [finding.text for one in found for finding in one.findings if finding.problem] == []
    assert stages["stages"]["sft"]["model"]["config"] == BOTH["model"]
    assert answers_a_step(method) == (0 if method == "dpo" else BOTH["trl"][method]["per_device_train_batch_size"])
