"""One optimizer step: the same whatever the micro-batches, clipped, skipped, halted, saved and restored."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plaudit.algorithms import Output
from plaudit.batch import Batch
from plaudit.compute.calls import available
from plaudit.learn import moving
from plaudit.learn.learner import Learner
from plaudit.learn.readout import policy_output
from plaudit.learn.scorer import Scorer
from plaudit.models.load import fresh_model
from plaudit.types import Role

Make = Callable[..., Learner]


def copied(learner: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}


def moved(learner: Learner, before: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((p.detach() - before[name]).abs().max()) for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC, Role.JUDGE])
@pytest.mark.parametrize("micro_tokens", [1, 12, 30, 60])
def test_weights_after_a_step_do_not_depend_on_micro_batches(
    role: Role, micro_tokens: int, make_learner: Make, batch: Batch
) -> None:
    # eps of the size of the gradients: Adam's first step is g / (|g| + eps), a sign where g is rounding alone
    optimizer = {"eps": 1e-3}
    whole = make_learner(role, optimizer=optimizer)
    parts = make_learner(role, optimizer=optimizer, settings={"micro_tokens": micro_tokens})
    assert len(batch.micro(8192)) == 1 < len(batch.micro(micro_tokens))
    before = copied(whole)
    first, second = whole.step(batch, 0), parts.step(batch, 0)
    for name, tensor in copied(whole).items():
        torch.testing.assert_close(copied(parts)[name], tensor, atol=1e-6, rtol=0)
    assert max(moved(whole, before).values()) > 1e-3
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert second[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("caches", [True, False])
def test_prompts_stay_whole_where_a_pass_computes_them_once(
    caches: bool, make_learner: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by models that pad whole passes. Torch's attention copies what is shared."""
    learner = make_learner()
    monkeypatch.setattr(type(learner.model), "caches", caches)
    asked: list[tuple[bool, bool]] = []
    cut = Batch.micro

    def micro(batch: Batch, token_budget: int, *, together: bool = False, once: bool = False) -> list[Batch]:
        asked.append((together, once))
        return cut(batch, token_budget, together=together, once=once)

    monkeypatch.setattr(Batch, "micro", micro)
    learner.step(batch, 0)
    learner.evaluate(batch)
    ours = caches and available(torch.float32)
    assert asked == [(caches, ours), (caches, ours)]


def test_a_step_follows_adamw_by_hand(make_learner: Make, batch: Batch) -> None:
    """The first step of AdamW moves each weight by lr * g / (|g| + eps), after w *= 1 - lr * decay on matrices."""
    learner = make_learner(optimizer={"weight_decay": 0.5, "eps": 1e-4, "max_gradient_norm": 0.0})
    before = copied(learner)
    loss, _ = learner._loss(policy_output(learner.model, batch, 1.0), batch)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(learner.model.parameters())), strict=True))
    learner.step(batch, 0)
    for name, parameter in learner.model.named_parameters():
        g, decay = gradients[name], 0.5 if before[name].dim() >= 2 else 0.0
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * g / (g.abs() + 1e-4)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=1e-5)
    kinds = {name: before[name].dim() for name in before}
    assert {1, 2} == set(kinds.values())
    assert all(dim == 1 for name, dim in kinds.items() if "norm" in name or "bias" in name)


def test_gradients_are_clipped_to_the_norm_and_told_unclipped(make_learner: Make, batch: Batch) -> None:
    """With eps = 1 the first move is m = lr * g / (|g| + 1), so |g| = |m| / (lr - |m|)."""
    norms: list[float] = []
    for share in (0.0, 0.25, 2.0):
        limit = share * norms[0] if norms else 0.0
        optimizer = {"max_gradient_norm": limit, "eps": 1.0, "learning_rate": 1.0}
        learner = make_learner(dtype=torch.float64, optimizer=optimizer)
        before = copied(learner)
        told = learner.step(batch, 0)["gradient_norm/policy"]
        moves = [(p.detach() - before[name]).abs() for name, p in learner.model.named_parameters()]
        norms.append(math.sqrt(sum(float((m / (1.0 - m)).square().sum()) for m in moves)))
        assert told == pytest.approx(norms[0], rel=1e-5)
        assert all(p.grad is None for p in learner.model.parameters())
    assert norms == [pytest.approx(norms[0] * share, rel=1e-5) for share in (1.0, 0.25, 1.0)]


def test_the_rate_is_that_of_the_training_step(make_learner: Make, batch: Batch) -> None:
    learner = make_learner(optimizer={"schedule": "linear"}, total_steps=4)
    rates = [learner.step(batch, step)["learning_rate/policy"] for step in (0, 0, 1, 3)]  # two updates of step 0
    assert rates == pytest.approx([0.01, 0.01, 0.0075, 0.0025])
    for step, rate in ((0, 0.01), (2, 0.005)):  # AdamW's first step moves by the rate, whatever the gradient
        learner = make_learner(optimizer={"schedule": "linear"}, total_steps=4)
        before = copied(learner)
        learner.step(batch, step)
        assert max(moved(learner, before).values()) == pytest.approx(rate, rel=1e-3)


def test_a_policy_is_trained_and_asked_at_its_temperature(make_learner: Make, batch: Batch) -> None:
    learner = make_learner(temperature=0.5)
    expected = Scorer(learner.model, Role.REFERENCE, temperature=0.5).annotate(batch).reference
    assert expected is not None
    assert batch.weight is not None
    assert torch.equal(learner.annotate(batch).proximal, expected)  # type: ignore[arg-type]
    told = learner.step(batch, 0)["loss/policy"]
    assert told == pytest.approx(-float((expected * batch.weight).sum()), rel=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_what_is_not_finite_leaves_everything_alone(poison: float, make_learner: Make, batch: Batch) -> None:
    """1e38: the loss is finite still, its gradient is not."""
    learner = make_learner()
    learner.step(batch, 0)
    before = copied(learner)
    moments = {name: tensor.clone() for name, tensor in learner.optimizer.state().items()}
    loss = learner.loss
    learner.loss = lambda output, part: (
        loss(output, part)[0] * poison * (1e3 if poison == 1e38 else 1),
        loss(output, part)[1],
    )
    stats = learner.step(batch, 1)
    assert (stats["skipped"], stats["halted"]) == (1.0, 0.0)
    assert set(moved(learner, before).values()) == {0.0}
    assert all(torch.equal(tensor, moments[name]) for name, tensor in learner.optimizer.state().items())
    learner.loss = loss
    assert learner.step(batch, 2)["skipped"] == 0.0  # nothing of it is left in the gradients
    assert 0 < max(moved(learner, before).values()) < 0.1


def test_a_halt_takes_no_step(make_learner: Make, batch: Batch) -> None:
    reasons: list[float] = []

    def halt(stats: dict[str, float]) -> str | None:
        reasons.append(stats["loss/policy"])
        return "too far"

    learner = make_learner(halt=halt)
    before = copied(learner)
    stats = learner.step(batch, 0)
    assert (stats["skipped"], stats["halted"]) == (0.0, 1.0)
    assert reasons == [stats["loss/policy"]]
    assert set(moved(learner, before).values()) == {0.0}


def test_a_loss_that_tells_tensors_or_nothing_of_itself_is_recorded(make_learner: Make, batch: Batch) -> None:
    def loss(output: Output, batch: Batch) -> tuple[Tensor, Any]:
        assert output.logprobs is not None and batch.weight is not None
        total = -(output.logprobs * batch.weight).sum()
        return total, {"doubled": 2 * total}

    stats = make_learner(loss=loss).step(batch, 0)
    expected = make_learner().step(batch, 0)["loss/policy"]
    assert (stats["loss/policy"], stats["doubled"]) == (pytest.approx(expected), pytest.approx(2 * expected))
    assert {type(value) for value in stats.values()} == {float}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
def test_restored_learners_go_on_bit_for_bit(
    role: Role, dtype: torch.dtype, make_learner: Make, batch: Batch, tmp_path: Path
) -> None:
    ours = make_learner(role, dtype=dtype)
    for step in range(3):
        ours.step(batch, step)
    theirs = make_learner(role, dtype=dtype)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.restore(tmp_path / "state.safetensors", ours.save(tmp_path / "state.safetensors"))
    for step in range(3, 5):
        assert ours.step(batch, step) == theirs.step(batch, step)
    for name, tensor in copied(ours).items():
        assert torch.equal(tensor, copied(theirs)[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
def test_learners_go_on_bit_for_bit_with_what_another_held(
    role: Role, dtype: torch.dtype, make_learner: Make, batch: Batch
) -> None:
    ours = make_learner(role, dtype=dtype)
    for step in range(3):
        ours.step(batch, step)
    ours.passes.micro.lower(20)
    tensors, values = moving.moving(ours)
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    theirs = make_learner(role, dtype=dtype)
    moving.moved(theirs, held, values)
    for step in range(3, 5):
        assert ours.step(batch, step) == theirs.step(batch, step)
    for name, tensor in copied(ours).items():
        assert torch.equal(tensor, copied(theirs)[name])


def test_another_models_state_is_refused(make_learner: Make, batch: Batch, tmp_path: Path) -> None:
    ours = make_learner()
    ours.step(batch, 0)
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = make_learner(model=fresh_model(config | {"intermediate_size": 16}, vocab_size=50))
    values = ours.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"exp_avg/layers\.0"):
        other.restore(tmp_path / "state.safetensors", values)
    config = ours.model.hf_config() | {"vocab_size": 49}
    smaller = make_learner(model=fresh_model(config))
    with pytest.raises(ValueError, match=r"embedding\.weight .*\(50, .*\(49, "):
        smaller.restore(tmp_path / "state.safetensors", values)


def test_evaluation_tells_the_loss_and_changes_nothing(make_learner: Make, batch: Batch) -> None:
    learner = make_learner(settings={"micro_tokens": 10})
    before = copied(learner)
    told = learner.evaluate(batch)
    assert set(moved(learner, before).values()) == {0.0}
    assert all(p.grad is None for p in learner.model.parameters())
    assert told["loss/policy"] == pytest.approx(make_learner().step(batch, 0)["loss/policy"], abs=1e-5)


def test_steps_too_small_for_bfloat16_add_up_in_its_masters(make_learner: Make, batch: Batch) -> None:
    """From 1 a bfloat16 goes down by 2^-8 at least: sixteen steps of 2^-11 must get there all the same."""
    learner = make_learner(dtype=torch.bfloat16, optimizer={"learning_rate": 2**-11, "eps": 1e-30})
    names = [name for name, p in learner.model.named_parameters() if "norm.weight" in name]
    before = copied(learner)
    assert all((before[name] == 1).all() for name in names)
    learner.step(batch, 0)
    first = copied(learner)
    assert all(torch.equal(first[name], before[name]) for name in names)
    for step in range(1, 16):
        learner.step(batch, step)
    after, masters = copied(learner), learner.optimizer.state()
    assert max(float((after[name] - 1).abs().max()) for name in names) >= 2**-8
    for name, parameter in after.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(masters[f"master/{name}"].bfloat16(), parameter)


def test_micro_batches_add_up_in_float32_under_bfloat16(make_learner: Make, batch: Batch) -> None:
    """Four equal passes: each alone gives the same gradient, and their sum is four times it, exactly."""
    learner = make_learner(dtype=torch.bfloat16)
    learner._work(trains=True)(batch)
    learner.optimizer.collect()
    once = {name: gradient.clone() for name, gradient in learner.optimizer.collected.items()}
    for _ in range(2):
        learner._work(trains=True)(batch)
    learner.optimizer.collect()
    assert once.keys() == learner.optimizer.masters.keys()
    for name, gradient in learner.optimizer.collected.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, once[name] * 3)


def test_bfloat16_learns_what_float32_learns(make_learner: Make, batch: Batch) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        learner = make_learner(dtype=dtype)
        stats = [learner.step(batch, step) for step in range(8)]
        assert all(not s["skipped"] for s in stats)
        losses.append([s["loss/policy"] for s in stats])
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
