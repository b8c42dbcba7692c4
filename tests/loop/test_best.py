"""Which checkpoint is the best, when a run has stopped getting better, and what stays of both."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_resume import assert_same_run

from plaudit import load_settings, run
from plaudit.loop.best import Best
from plaudit.loop.checkpoint import Store
from plaudit.loop.progress import Delivery, Moment, Progress
from plaudit.models.folders import local_folder
from plaudit.support.errors import Stopped


def after(best: Best, values: list[float | None], *, begin: int = 1) -> list[Any]:
    """Shows a value of `loss` and `accuracy` a step (None: no evaluation); returns what it told, the best step."""
    told = []
    for step, value in enumerate(values, start=begin):
        stats = {"loss": 0.0} if value is None else {"validation/loss": value, "validation/accuracy": value}
        told.append(asyncio.run(best(now := moment(step, stats))).get("best/step"))
        assert best.now(now.progress) == (told[-1] == step)
    return told


def moment(step: int, stats: dict[str, float]) -> Moment:
    progress = Progress(step=step, epoch_step=step)
    return Moment(progress=progress, delivery=Delivery(batch=None, epoch=1), batch=None, stats=stats, last=False)


def test_of_losses_the_lowest_is_the_best_and_of_others_the_highest() -> None:
    values = [2.0, None, 1.0, 3.0, 1.0, 3.0]
    assert after(Best("loss", None), values) == [1, None, 3, 3, 3, 3]  # no better is not better
    assert after(Best("accuracy", None), values) == [1, None, 1, 4, 4, 4]
    assert after(Best(None, None), values) == [None] * 6


def test_what_is_not_finite_is_never_better() -> None:
    best = Best("loss", 2)
    assert after(best, [math.nan]) == [None]
    assert not best.exhausted
    assert after(best, [-math.inf], begin=2) == [None]
    assert best.exhausted
    again = Best("loss", 2)
    again.restore(json.loads(json.dumps(best.state(), allow_nan=False)))
    assert again.exhausted
    assert after(best, [5.0, math.nan], begin=3) == [3, 3]
    assert (best.value, best.stood, best.checkpoint) == (5.0, 1, "epoch1epochstep3globalstep3")


def test_patience_counts_evaluations_in_a_row_without_a_better_one() -> None:
    best, endless = Best("loss", 2), Best("loss", None)
    ended = []
    for step, value in enumerate([3.0, 4.0, 2.0, None, 2.0, None, 2.5], start=1):
        for one in (best, endless):
            after(one, [value], begin=step)
        ended.append(best.exhausted)
        assert not endless.exhausted
    assert ended == [False] * 6 + [True]
    why = "ended early: no better in 2 evaluations"
    assert best.summary(early=True) == [why, "best: validation/loss 2.0000 at step 3"]
    assert best.summary(early=False) == endless.summary(early=True) == best.summary(early=True)[1:]
    assert Best("loss", 2).summary(early=True) == []


def test_it_goes_on_from_its_state_unless_that_is_of_another_figure() -> None:
    before = Best("loss", 2)
    after(before, [3.0, 4.0])
    same, other = Best("loss", 2), Best("accuracy", 2)
    for one in (same, other):
        one.restore(before.state())
    assert same.state() == before.state()
    assert other.state() == Best("accuracy", 2).state()
    assert Best(None, None).state() is None
    other.restore(Best("accuracy", 2).state())  # of a checkpoint before the first evaluation
    assert after(other, [5.0], begin=3) == [3]
    assert after(same, [5.0], begin=3) == [1]
    assert same.exhausted


def test_a_figure_that_evaluations_do_not_have_is_named_with_those_that_they_have() -> None:
    with pytest.raises(ValueError, match=r"evaluate\.best=los: .* accuracy, loss"):
        after(Best("los", None), [1.0])


def test_an_evaluation_whose_rewards_all_failed_counts_for_nothing() -> None:
    best = Best("reward/gold", 2)
    failed: dict[str, float] = {"validation/reward/failed": 1.0}
    seen = [failed, {"validation/reward/gold": 1.0, "validation/reward/failed": 0.0}, failed, failed]
    seen += [{"validation/reward/failed": 0.0}]  # gold's weight is 0: it is shown alone
    told = [asyncio.run(best(moment(step, stats))) for step, stats in enumerate(seen, start=1)]
    assert told == [{}, *[{"best/step": 2.0}] * 4]
    assert (best.step, best.stood, best.exhausted) == (2, 0, False)


def test_a_first_evaluation_whose_answers_are_all_masked_counts_for_nothing() -> None:
    best = Best("reward/mean", 2)
    stats = {"validation/reward/failed": 0.0, "validation/reward/judge": 0.3, "validation/unfinished": 1.0}
    assert asyncio.run(best(moment(1, stats))) == {}
    with pytest.raises(ValueError, match="reward/good"):
        asyncio.run(Best("reward/good", 2)(moment(1, stats | {"validation/reward/mean": 0.3})))


# --- whole runs

GETS_WORSE = {
    "train": {"steps": 40},
    "optimizer": {"learning_rate": 0.02},
    "data": {"validation": "20%"},
    "save": {"keep": 1},
    "evaluate": {"every": 1, "best": "loss", "patience": 2},
}


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_and_its_best_checkpoint_is_its_model(make_recipe: Any, tmp_path: Path) -> None:
    done = run(load_settings(make_recipe("sft", tmp_path, **GETS_WORSE)))
    losses = [record["validation/loss"] for record in done.metrics]
    best = 1 + losses.index(min(losses))
    assert len(losses) == best + 2 < 40
    assert [record["best/step"] for record in done.metrics[-3:]] == [best] * 3
    store = Store(done.folder / "checkpoints")
    assert [int(name.rpartition("step")[2]) for name in store.names()] == [best, best + 2]
    assert done.model.name == store.names()[0] == local_folder(str(done.folder)).name
    log = (done.folder / "log.txt").read_text()
    assert "ended early: no better in 2 evaluations" in log
    assert f"best: validation/loss {min(losses):.4f} at step {best}" in log
    assert f"done: policy in {done.model}" in log
    again = run(load_settings(make_recipe("sft", tmp_path, **GETS_WORSE, resume="latest")))
    assert len(again.metrics) == best + 2
    assert "the run is finished" in (done.folder / "log.txt").read_text()


def test_patience_that_runs_out_at_the_last_step_ends_nothing_early(make_recipe: Any, tmp_path: Path) -> None:
    same = GETS_WORSE | {"optimizer": {"learning_rate": 1e-30}, "train": {"steps": 3}}  # moves nothing
    done = run(load_settings(make_recipe("sft", tmp_path, **same)))
    log = (done.folder / "log.txt").read_text()
    assert "step 3/3" in log
    assert "ended early" not in log
    assert log.count("best: validation/loss") == 1
    assert "at step 1" in log


@pytest.mark.slow
def test_a_run_that_was_stopped_remembers_its_best(make_recipe: Any, tmp_path: Path) -> None:
    full = run(load_settings(make_recipe("sft", tmp_path / "full", **GETS_WORSE)))

    async def stop(moment: Moment) -> None:
        if moment.progress.step == len(full.metrics) - 1:
            raise Stopped(15, moment.progress.step)

    with pytest.raises(Stopped):
        run(
            load_settings(make_recipe("sft", tmp_path / "stopped", **GETS_WORSE | {"save": {"every": 1}})), hooks=[stop]
        )
    again = run(load_settings(make_recipe("sft", tmp_path / "stopped", **GETS_WORSE, resume="latest")))
    assert_same_run(again.folder, full.folder)
    assert again.model.name == full.model.name


@pytest.mark.slow
def test_rewards_of_answers_to_held_out_prompts_are_compared_too(make_recipe: Any, tmp_path: Path) -> None:
    evaluate = {"every": 1, "best": "reward/mean"}
    done = run(load_settings(make_recipe("rloo", tmp_path, data={"validation": "30%"}, evaluate=evaluate)))
    rewards = [record["validation/reward/mean"] for record in done.metrics]
    assert done.metrics[-1]["best/step"] == 1 + rewards.index(max(rewards))


def test_a_damaged_best_checkpoint_leaves_the_newest(make_recipe: Any, tmp_path: Path) -> None:
    done = run(load_settings(make_recipe("sft", tmp_path, **GETS_WORSE)))
    best, newest = Store(done.folder / "checkpoints").names()
    (done.folder / "checkpoints/policy" / best / "config.json").write_text("{}")
    assert done.model.name == newest
