"""PPO where every answer is worth the same: nothing speaks for being cut off, so it must not become the rule.

A score and the critic's value after the cut together counted the rest twice. In this very run the critic's mean then
went to 7.5 and unfinished answers from 0.7 to 1 within 20 steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plaudit import Settings, load_settings, run
from plaudit.loop.progress import Moment

pytestmark = pytest.mark.slow


def one() -> float:
    return 1.0


@pytest.fixture(scope="module")
def writer(make_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that ends about every second answer within 24 tokens."""
    learned = {"optimizer": {"learning_rate": 0.01}, "train": {"steps": 60, "batch_size": 8}}
    return run(load_settings(make_recipe("sft", tmp_path_factory.mktemp("sft"), **learned))).folder


def answering(make_recipe: Any, writer: Path, method: str, folder: Path, **more: Any) -> Settings:
    recipe = make_recipe(method, folder, rollout={"max_tokens": 24}, **more)
    recipe["model"] = {"path": str(writer)}
    return load_settings(recipe)


@pytest.mark.parametrize("unfinished", ["score", "penalty", "bootstrap", "mask"])
def test_unfinished_answers_do_not_become_the_rule(
    unfinished: str, make_recipe: Any, writer: Path, tmp_path: Path
) -> None:
    values: list[float] = []

    async def look(moment: Moment) -> None:
        """The critic's mean over a step's tokens."""
        assert moment.batch is not None and moment.batch.values is not None
        values.append(float(moment.batch.values[moment.batch.trainable].mean()))

    settings = answering(
        make_recipe,
        writer,
        "ppo",
        tmp_path,
        rewards=[{"kind": "function", "function": f"{__file__}:one"}],
        shaping={"unfinished": unfinished},
        optimizer={"learning_rate": 0.001},
        critic={"learning_rate": 0.01},
        train={"steps": 20},
    )
    settings.rollout.prompts_per_step = settings.rollout.slots = 48
    done = run(settings, hooks=[look])
    shares = [record["unfinished"] for record in done.metrics]
    before, after = shares[0], sum(shares[-5:]) / 5
    assert 0.4 < before < 0.9, "or the run shows nothing"
    assert after < before + 0.1
    if unfinished == "penalty":
        assert after < 0.15, "every cut costs 2"
    expected = 1 - 2 * after if unfinished == "penalty" else 1.0
    assert sum(values[-5:]) / 5 == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("method", ["grpo", "rloo", "remax"])
@pytest.mark.parametrize("baseline", [False, True])
def test_masked_answers_count_in_baselines_by_setting(
    method: str, baseline: bool, make_recipe: Any, writer: Path, tmp_path: Path
) -> None:
    """In passes so small that some hold nothing that is trained."""
    more = {"algorithm": {"samples": 3}, "learn": {"micro_tokens": 8}}
    shaping = {"unfinished": "mask_loss" if baseline else "mask"}
    done = run(answering(make_recipe, writer, method, tmp_path, shaping=shaping, **more))
    cut = [sample for sample in done.samples if sample["finish"] == "length"]
    assert {sample["reward"] is not None for sample in cut} == {baseline}
    assert {sample["advantage"] for sample in cut} == {None}
    ended = [sample for sample in done.samples if sample["finish"] != "length" and not sample["greedy"]]
    greedy_cut = {(sample["step"], sample["group"]) for sample in cut if sample["greedy"]}
    compared = [baseline or (sample["step"], sample["group"]) not in greedy_cut for sample in ended]
    assert [sample["advantage"] is not None for sample in ended] == compared
    assert ended and bool(greedy_cut) == (method == "remax")
