"""Memory that runs out in a pass: the step again in smaller ones, with the same gradient, and remembered."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_at_work import at_work
from safetensors.torch import load_file
from torch import Tensor

from plaudit.batch import Batch
from plaudit.learn.learner import Learner
from plaudit.learn.passes import Passes, UnitTooLong
from plaudit.learn.scorer import Scorer
from plaudit.learn.settings import LearnSettings
from plaudit.monitor.health import Health
from plaudit.runtime.memory import OutOfMemory, RankOutOfMemory, out_of_memory
from plaudit.types import Role

pytestmark = pytest.mark.slow

Make = Callable[..., Learner]


def too_much() -> None:
    """What torch raises on the CPU, by an allocation that no machine has room for."""
    torch.empty(1 << 55, dtype=torch.uint8)


def short(loss: Any, most: int, where: str) -> Any:
    """A loss that allocates too much where a pass has more than `most` tokens."""

    def measured(output: Any, part: Batch) -> Any:
        large = len(part.tokens) > most
        if large and where == "forward":
            too_much()
        found, figures = loss(output, part)
        if large and where == "backward":
            found.register_hook(lambda gradient: too_much())
        return found, figures

    return measured


def gradients(learner: Learner) -> list[Tensor]:
    return [gradient.clone() for gradient in learner.optimizer.collected.values()]


def test_what_running_out_of_memory_looks_like() -> None:
    with pytest.raises(RuntimeError) as e:
        too_much()
    assert out_of_memory(e.value)
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN, where its buffers do not fit
    assert not out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    for error in (UnitTooLong(800, "Lower it."), RankOutOfMemory("rank 1 ran out", 64, 128)):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
        assert isinstance(again, OutOfMemory)


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC, Role.JUDGE])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_is_done_again_in_smaller_micro_batches_with_the_same_gradient(
    where: str, role: Role, make_learner: Make, batch: Batch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    whole, learner = make_learner(role), make_learner(role)
    expected = whole.prepare(batch, 0, 1.0)
    learner.loss = short(learner.loss, 40, where)
    with caplog.at_level(logging.WARNING):
        stats = learner.prepare(batch, 0, 1.0)
    assert f" {len(batch.tokens)} tokens" in caplog.text
    assert "learn.micro_tokens=42" in caplog.text or "learn.micro_tokens=21" in caplog.text
    for mine, theirs in zip(gradients(learner), gradients(whole), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    lowered = stats.pop("micro_tokens/min")
    assert lowered == learner.passes.micro.tokens <= 42
    assert stats == pytest.approx(expected, abs=1e-5)
    learner.apply(True)
    caplog.clear()
    learner.prepare(batch, 1, 1.0)  # from here on it begins with what fits
    assert not caplog.text
    state = tmp_path / "state.safetensors", learner.save(tmp_path / "state.safetensors")
    other = make_learner(role)
    other.restore(*state)
    assert other.passes.micro.tokens == lowered
    asked = make_learner(role, settings={"micro_tokens": 4096})
    asked.restore(*state)
    assert asked.passes.micro.tokens == 4096  # somebody has set another number since


def test_what_a_failed_pass_left_in_a_circle_is_freed_before_a_smaller_one(make_learner: Make, batch: Batch) -> None:
    """On a GPU, torch.compile left a whole pass that way: on 80 GB, passes of half and a quarter failed beside it."""
    learner, left = make_learner(Role.POLICY), list[weakref.ref[Tensor]]()
    plain = learner.loss

    def measured(output: Any, part: Batch) -> Any:
        if not left:
            circle = [output.logprobs]
            circle.append(circle)
            left.append(weakref.ref(output.logprobs))
            too_much()
        assert left[0]() is None
        return plain(output, part)

    learner.loss = measured
    gc.disable()
    try:
        learner.prepare(batch, 0, 1.0)
    finally:
        gc.enable()
    assert learner.passes.micro.lowered


def test_a_row_that_does_not_fit_names_its_length_and_the_settings(make_learner: Make, batch: Batch) -> None:
    learner = make_learner()
    learner.loss = short(learner.loss, 12, "backward")
    with pytest.raises(UnitTooLong, match=r"\d+ tokens .*data\.max_tokens.*learn\.micro_tokens") as e:
        learner.prepare(batch, 0, 1.0)
    assert e.value.tokens == max(int(pair.sum()) for pair in batch.lengths.view(-1, 2))  # units of this batch are pairs
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def narrow(monkeypatch: pytest.MonkeyPatch, model: Any, most: int) -> None:
    original = model.forward

    def forward(tokens: Tensor, *given: Any, **named: Any) -> Any:
        if len(tokens) > most:
            too_much()
        return original(tokens, *given, **named)

    monkeypatch.setattr(model, "forward", forward)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
def test_scoring_and_evaluating_go_on_in_smaller_passes(
    role: Role, make_learner: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, learner = make_learner(role), make_learner(role)
    expected, figures = whole.annotate(batch), whole.evaluate(batch)
    narrow(monkeypatch, learner.model, 48)
    found = learner.annotate(batch)
    for name in ("proximal",) if role is Role.POLICY else ("values", "bootstrap"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert learner.passes.score.tokens <= 48
    assert learner.evaluate(batch) == pytest.approx(figures, abs=1e-6)
    assert learner.prepare(batch, 0, 1.0)["score_tokens/min"] == learner.passes.score.tokens


@pytest.mark.usefixtures("kernels")
def test_a_judge_and_a_reference_keep_to_what_fits(make_learner: Make, batch: Batch, monkeypatch: Any) -> None:
    model = make_learner(Role.JUDGE).model
    expected = [float(score) for output in Scorer(model, Role.JUDGE).outputs(batch) for score in output.scores]
    scorer = Scorer(model, Role.JUDGE, token_budget=64)
    narrow(monkeypatch, model, 40)
    assert [float(score) for output in scorer.outputs(batch) for score in output.scores] == expected
    assert scorer.budget.tokens <= 32
    monkeypatch.undo()
    narrow(monkeypatch, model, 1)
    with pytest.raises(UnitTooLong, match="without gradients"):
        scorer.outputs(batch)


def test_other_errors_are_not_taken_for_it(make_learner: Make, batch: Batch) -> None:
    learner, calls = make_learner(), []

    def broken(output: Any, part: Batch) -> Any:
        calls.append(1)
        raise RuntimeError("a bug")

    learner.loss = broken
    with pytest.raises(RuntimeError, match="a bug"):
        learner.prepare(batch, 0, 1.0)
    assert len(calls) == 1


def test_ranks_take_the_smallest_passes_of_any() -> None:
    passes = Passes.of(LearnSettings())
    assert passes.figures() == {}
    passes.agree({"micro_tokens/min": 512.0})
    assert passes.figures() == {"micro_tokens/min": 512.0}
    assert passes.state() == {"micro": [8192, 512]}


def test_health_says_once_what_to_set() -> None:
    health = Health()
    figures = {"step": 3.0, "micro_tokens/min": 2048.0}
    (alarm,) = health.alarms(figures)
    assert alarm.sign == "memory" and alarm.saw.endswith("(micro_tokens=2048).")
    assert alarm.advice.startswith("Lower learn.micro_tokens")
    assert [health.alarms(figures) for _ in range(100)] == [[]] * 100


# --- two ranks


def test_on_two_ranks_only_one_of_which_runs_out(make_recipe: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    """No rank waits for ever; both go on with the smaller passes, to the same weights."""
    # eps of the size of the gradients: Adam's first step is g / (|g| + eps), a sign where g is rounding alone
    recipe = make_recipe("sft", tmp_path, optimizer={"eps": 1e-3}) | {"device": "cpu"}
    job = {"recipe": recipe, "folder": str(tmp_path / "none"), "steps": [0, 2]}
    jobs = [job | {"out": str(tmp_path / "whole")}, job | {"out": str(tmp_path / "short"), "short": [1, 30]}]
    at_work(jobs, 2, tmp_path / "ranks", environment)
    whole, short_ = (load_file(tmp_path / name / "policy.safetensors") for name in ("whole", "short"))
    for name, tensor in whole.items():
        torch.testing.assert_close(short_[name], tensor, atol=1e-6, rtol=0)
    figures = json.loads((tmp_path / "short/figures.json").read_text())["steps"]
    # A pass of at most so many tokens may compute fewer, those that its rows share once: 30 is the bound of these.
    assert figures[0]["micro_tokens/min"] == figures[1]["micro_tokens/min"] < 60


def test_on_two_ranks_a_row_that_does_not_fit_on_one_ends_both(
    make_recipe: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    recipe = make_recipe("sft", tmp_path) | {"device": "cpu"}
    job = {"recipe": recipe, "folder": str(tmp_path / "none"), "steps": [0, 2], "out": str(tmp_path / "out")}
    with pytest.raises(AssertionError, match=r"\d+ tokens") as e:
        at_work([job | {"short": [1, 1]}], 2, tmp_path / "ranks", environment)
    assert str(e.value).count("plaudit.learn.passes.UnitTooLong: memory does not hold") == 2
