"""The schedule by hand."""

from __future__ import annotations

import math

import pytest

from assent.learn.optim import build_optimizer, schedule
from assent.learn.settings import OptimizerSettings
from assent.models.load import fresh_model


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (OptimizerSettings(schedule="constant"), [1, 1, 1, 1, 1]),
        (OptimizerSettings(schedule="linear"), [1, 0.8, 0.6, 0.4, 0.2]),  # 0 would be reached behind the last step
        (OptimizerSettings(schedule="linear", min_ratio=0.5), [1, 0.9, 0.8, 0.7, 0.6]),
        # warm-up over 0.4 * 5 = 2 steps: thirds, so that step 2 is the first at the full rate; then 3 steps of decay
        (OptimizerSettings(schedule="linear", warmup=0.4), [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]),
        (OptimizerSettings(schedule="constant", warmup=0.4), [1 / 3, 2 / 3, 1, 1, 1]),
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


def test_decay_is_on_matrices_only_and_each_parameter_is_there_once() -> None:
    model = fresh_model({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}, vocab_size=10)
    optimizer = build_optimizer(model, OptimizerSettings(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(p): 0.3 if p.dim() >= 2 else 0.0 for p in model.parameters()}
