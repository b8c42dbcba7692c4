"""The study of episodes: its examples are right, and all of it runs and is shown with a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import episodes
import pytest
from pictures import PICTURES, episode_tables

from plaudit.models.load import fresh_model, load_tokenizer, save_model
from plaudit.tasks.demo import DemoFiles


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_examples_call_the_tool_and_say_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("episodes.smollm2.fetched", lambda: tmp_path)
    episodes.made(tmp_path / "sums", "calculator", 5)
    asked, call, told, said = rows(tmp_path / "sums" / "played.jsonl")[0]["messages"]
    expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
    assert asked["content"] == f"What is {expression}?"
    assert int(told["content"]) == eval(expression) > 0, "rewards read no sign"
    assert said["content"] == f"It is {told['content']}."
    kept = [{row["prompt"] for row in rows(tmp_path / "sums" / f"{name}.jsonl")} for name in ("test", "prompts")]
    assert (len(kept[0]), kept[0] & kept[1]) == (episodes.TESTED["calculator"], set())
    assert asked["content"] not in kept[0]


def test_examples_of_games_are_told_the_truth_and_played_poorly() -> None:
    """What is said after a guess is true of the number that ends the game; some guesses are made twice."""
    chats = [[*episodes.game(random.Random(seed))] for seed in range(40)]
    wasted = 0
    for chat in chats:
        guesses = [int(turn["content"]) for turn in chat if turn["role"] == "assistant"]
        told = [turn["content"] for turn in chat[2::2]]
        assert len(guesses) <= episodes.TRIES
        if len(guesses) < episodes.TRIES:
            assert told == [f"It is {'higher' if one < guesses[-1] else 'lower'}." for one in guesses[:-1]]
        wasted += sum(one in guesses[:place] for place, one in enumerate(guesses))
    assert 5 < wasted < 60


@pytest.mark.slow
def test_all_of_it_runs_and_is_shown(demo: DemoFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 20, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 5}
    model = fresh_model({"model_type": "llama", **sizes, "max_position_embeddings": 2048}, vocab_size=450, seed=0)
    save_model(model, tmp_path / "model", tokenizer=load_tokenizer(str(demo.tokenizer)))
    monkeypatch.setattr("episodes.smollm2.fetched", lambda: tmp_path / "model")
    monkeypatch.setattr(episodes, "OWN", episodes.CHATS)  # its tokenizer has no template of its own
    monkeypatch.setattr(episodes, "TESTED", {"calculator": 4, "guess": 4})
    monkeypatch.setattr(episodes, "EXAMPLES", {"calculator": 4, "guess": 40})
    seed = episodes.SEEDS[0]
    for task in episodes.TASKS:
        own = episodes.MADE_BY[task]
        short = {"algorithm": {"samples": 2}, "rollout": {**own["grpo"]["rollout"], "prompts_per_step": 2}}
        long = {"data": {**own["sft"]["data"], "max_tokens": 2000}}
        monkeypatch.setitem(own, "sft", {**own["sft"], **long})
        monkeypatch.setitem(own, "grpo", {**own["grpo"], **short, "train": {"steps": 1}})
        for arm in episodes.TASKS[task]:
            first = episodes.measured(task, arm, seed, tmp_path / "lab")
            assert episodes.measured(task, arm, seed, tmp_path / "lab") == first, "what was measured is not run again"
            assert first["questions"] == 4
            assert first["low"] <= first["value"] <= first["high"]
            assert (first["cpu"] > 0) == (arm in own)
    found = episodes.found(tmp_path / "lab")
    assert {name: [*own] for name, own in found.items()} == {
        f"{task}/{arm}": [str(seed)] for task, arms in episodes.TASKS.items() for arm in arms
    }
    shown = "\n".join(episode_tables(found))
    assert all(name in shown for name in episodes.ARMS.values())
    PICTURES["episodes"](found, tmp_path / "episodes.png")
    assert (tmp_path / "episodes.png").read_bytes().startswith(b"\x89PNG")
