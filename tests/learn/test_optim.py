"""The schedule by hand."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from elsewhere import Away, elsewhere, moved
from torch.utils import _foreach_utils

from plaudit.learn.optim import Optimizer, schedule
from plaudit.learn.settings import OptimizerSettings
from plaudit.models.load import fresh_model


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (OptimizerSettings(schedule="constant"), [1, 1, 1, 1, 1]),
        (OptimizerSettings(schedule="linear"), [1, 0.8, 0.6, 0.4, 0.2]),  # 0 would be reached behind the last step
        (OptimizerSettings(schedule="linear", min_ratio=0.5), [1, 0.9, 0.8, 0.7, 0.6]),
        # warm-up over 0.4 * 5 = 2 steps: thirds, so that step 2 is the first at the full rate; then 3 steps of decay
        (OptimizerSettings(schedule="linear", warmup=0.4), [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]),
        (OptimizerSettings(schedule="constant", warmup=0.4), [1 / 3, 2 / 3, 1, 1, 1]),
        (OptimizerSettings(schedule="linear", warmup="2 steps"), [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]),
        (OptimizerSettings(schedule="linear", warmup="7 steps"), [n / 8 for n in range(1, 6)]),
        (
            OptimizerSettings(schedule="cosine", min_ratio=0.1),
            [0.1 + 0.9 * (1 + math.cos(math.pi * n / 5)) / 2 for n in range(5)],
        ),
    ],
)
def test_the_rate_over_five_steps(settings: OptimizerSettings, expected: list[float]) -> None:
    assert [schedule(step, 5, settings) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_behind_the_end_the_rate_stays_at_its_least(name: str) -> None:
    settings = OptimizerSettings(schedule=name, min_ratio=0.25)
    assert [schedule(step, 4, settings) for step in (4, 5, 50)] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize("warmup", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_the_rate_is_never_zero_nor_above_the_set_one_within_a_run(warmup: float, total: int) -> None:
    for name in ("constant", "linear", "cosine"):
        settings = OptimizerSettings(schedule=name, warmup=warmup)
        assert all(0 < schedule(step, total, settings) <= 1 for step in range(total))


def test_twenty_steps_are_those_of_torchs_adamw_with_decay_on_matrices_only() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    ours, theirs = (fresh_model(config, vocab_size=10, seed=3) for _ in range(2))
    settings = OptimizerSettings(weight_decay=0.3, betas=(0.8, 0.99), eps=1e-6, max_gradient_norm=1.0)
    mine = Optimizer(ours, settings)
    mine.rate = 0.01
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        size = 0.01 if step % 2 else 10.0  # below the limit and beyond it
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator) * size
            b.grad = a.grad.clone()
        mine.collect()
        assert mine.gradient_norm() == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        mine.step()
        other.step()
        mine.clear()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_what_is_frozen_has_no_state_and_stays() -> None:
    model = fresh_model({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}, vocab_size=10)
    model.embedding.requires_grad_(False)
    optimizer = Optimizer(model, OptimizerSettings())
    assert not any("embedding.weight" in key and "position" not in key for key in optimizer.state())
    with pytest.raises(ValueError, match=r"step/embedding\.weight"):
        optimizer.restore(["step/embedding.weight"], lambda key, tensor: None)


def test_a_state_of_another_precision_is_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    full, half = (
        Optimizer(fresh_model(config, vocab_size=10, dtype=dtype), OptimizerSettings())
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in ((full, half), (half, full)):
        with pytest.raises(ValueError, match=r"learn\.precision"):
            one.restore(other.state(), lambda key, tensor: None)


def test_a_step_is_noted_by_every_parameter() -> None:
    """Whoever keeps a copy of the weights in another form goes by torch's count of writes."""
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=0.1))
    before = [parameter._version for parameter in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.collect()
    optimizer.gradient_norm()
    optimizer.step()
    assert all(now > then for now, then in zip((p._version for p in model.parameters()), before, strict=True))


def test_gradients_of_a_weight_that_is_used_twice_are_added_up_in_float32() -> None:
    """1 + 2^-9 has one bit more than bfloat16."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(model, OptimizerSettings())
    (model(torch.ones(1, 1).bfloat16()) + 2**-9 * model(torch.ones(1, 1).bfloat16())).sum().backward()
    optimizer.collect()
    assert optimizer.gradient_norm() == 1 + 2**-9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rest_between_steps_changes_nothing(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    models = [fresh_model(config, vocab_size=10, seed=3, dtype=dtype, device=device) for _ in range(2)]
    optimizers = [Optimizer(model, OptimizerSettings(learning_rate=0.1)) for model in models]
    for step in range(3):
        optimizers[1].offload()
        assert {value.device.type for value in optimizers[1].state().values()} == {"cpu"}
        optimizers[1].onload()
        assert {value.device.type for value in optimizers[1].state().values()} == {device}
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step, dtype=torch.float32)
            optimizer.collect()
            optimizer.gradient_norm()
            optimizer.step()
            optimizer.clear()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert not any(torch.equal(p, torch.zeros_like(p)) for p in models[0].parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_waits_in_host_memory_takes_the_same_steps(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in several buckets, on a device apart that refuses whatever mixes the two memories."""
    listed = _foreach_utils._get_foreach_kernels_supported_devices
    monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*listed(), "meta"])
    monkeypatch.setattr("plaudit.learn.ranks.BUCKET_ELEMENTS", 150)
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    here, there = (fresh_model(config, vocab_size=10, seed=3, dtype=dtype) for _ in range(2))
    moved(there)
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.1)
    stays = Optimizer(here, settings)
    with elsewhere():
        waiting = Optimizer(there, settings, waits=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = Away(mine.grad.clone())
        for optimizer, place in ((stays, nullcontext()), (waiting, elsewhere())):
            with place:
                optimizer.collect()
                optimizer.gradient_norm()
                optimizer.step()
                optimizer.clear()
                optimizer.onload()
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert isinstance(theirs, Away)
        assert torch.equal(mine, theirs.inner)
    state = waiting.state()
    assert state.keys() == stays.state().keys(), "a checkpoint is that of an optimizer on the device"
    for key, value in stays.state().items():
        assert not isinstance(state[key], Away)
        assert torch.equal(value, state[key])
