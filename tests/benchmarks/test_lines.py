"""The choice of lines, and that every line is one that can be run."""

from __future__ import annotations

import pytest
from bench import read_options
from lines import ASIDE, EVERY, LINES, REAL, SMALL, WIDE, chosen, rows
from measure import PEERS
from task import MODELS, PRECISIONS, Task, richness


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_is_sound(line) -> None:  # type: ignore[no-untyped-def]
    assert LINES[line.name] is line
    assert set(line.usual) <= set(line.cells) <= {*EVERY, *WIDE, *REAL}
    assert set(line.peers) <= set(PEERS)
    assert set(line.steps) <= set(MODELS)
    assert line.rows % (line.samples * (2 if line.method in ("reward", "dpo") else 1)) == 0
    assert line.shortest <= line.longest
    assert (line.base is not None) == (line.peers == ("plaudit",))
    if line.quick:
        assert SMALL in line.cells


def test_names_of_lines() -> None:
    assert chosen(["sft"]) == ["sft"], "a line's own name names nothing else"
    assert chosen(["ppo"]) == ["ppo-1", "ppo-4"]
    assert chosen(["start", "grpo"]) == ["grpo", *ASIDE], "in the order of the table"
    with pytest.raises(ValueError, match=r"'ghost'.* sft, "):
        chosen(["sft", "ghost"])


def test_extents() -> None:
    def keys(**given) -> list[str]:  # type: ignore[no-untyped-def]
        return [
            row.key
            for row in rows(["sft", "ppo-4"], given.get("models"), given.get("precisions"), extent=given["extent"])
        ]

    assert keys(extent="quick") == ["sft 4M fp32", "ppo-4 4M fp32"]
    assert keys(extent="usual") == ["sft 4M fp32", "sft 25M fp32", "sft 4M bf16", "sft 25M bf16", "ppo-4 4M fp32"]
    assert keys(extent="full")[-1] == "ppo-4 25M fp32"
    assert keys(extent="usual", models=["25M"], precisions=["fp32"]) == ["sft 25M fp32", "ppo-4 25M fp32"]
    pretrained = [row.key for row in rows(LINES, ["135M-49k"], None, extent="usual")]
    assert pretrained == [f"{name} 135M-49k fp32" for name in ("sft", "dpo", "grpo-lora", "gen-64-varied")]


def test_options_as_a_person_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "bench.py --lines sft,grpo --models 4M --precision fp32 --threads 1"
    monkeypatch.setattr("sys.argv", given.split())
    options = read_options()
    assert (options.lines, options.models, options.precision, options.threads) == (["sft", "grpo"], ["4M"], ["fp32"], 1)


@pytest.mark.parametrize("slip", ["--lines ghost", "--models 5M", "--precision fp64", "--threads 0", "--repeats 0"])
def test_slips_are_refused(slip: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", *slip.split()])
    with pytest.raises(SystemExit):
        read_options()
    assert slip.split()[1] in capsys.readouterr().err


def task(**more) -> Task:  # type: ignore[no-untyped-def]
    given = {
        "method": "sft",
        "model": "4M",
        "precision": "fp32",
        "threads": 1,
        "weights": "w",
        "data": "d",
        "output": "o",
    }
    return Task(**{**given, "steps": 3, "repeats": 2, "rows": 32, **more})


def test_a_task_knows_what_data_it_uses() -> None:
    assert task().total_steps == 9
    assert task().needed == 9 * 32
    assert task(method="dpo").needed == 9 * 16, "pairs"
    assert task(method="grpo", samples=4).needed == 9 * 8, "prompts"
    assert task(method="generate", samples=8).needed == 4, "the same prompts in every pass"


def test_a_task_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = task(greedy=True)
    assert Task.read(one.write(tmp_path / "task.json")) == one
    assert one.dtype == PRECISIONS["fp32"]


def test_lengths_are_spread_and_repeatable() -> None:
    lengths = task(rows=500, shortest=4, longest=128).lengths()
    assert lengths == task(rows=500, shortest=4, longest=128).lengths()
    assert min(lengths) == 4
    assert max(lengths) == 128
    assert set(task(rows=5).lengths()) == {64}


def test_rewards_hardly_ever_tie() -> None:
    """A pair whose rewards tie says nothing, and its tokens would be dropped by one side only."""
    assert richness("a b c") != richness("a c b")
    assert richness("a b c d") > richness("a b a b")
