"""The table of the stages of ZeRO, and what a rank counts as held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zero import table
from zero_rank import LENGTH, ROWS, VOCABULARY, held, rows_of


def row(system: str, speed: float, resumed: dict[int, float | str]) -> dict[str, Any]:
    return {"case": "zero1", "system": system, "tokens/s": speed, "held": 150.4, "peak": 900.0, "gap": 1e-9} | {
        "resumed": resumed
    }


def test_a_ratio_is_to_deepspeed_on_the_same_case() -> None:
    rows = [row("plaudit", 300.0, {1: 2e-7, 3: 1e-7}), row("deepspeed", 200.0, {1: "Exception: no", 3: "no"})]
    assert table(rows).splitlines()[2:] == [
        "| zero1 | plaudit | 300 | 1.50 | 150 | 900 | 1e-09 | 2e-07 | 1e-07 |",
        "| zero1 | deepspeed | 200 |  | 150 | 900 | 1e-09 | refused | refused |",
    ]


@pytest.mark.slow
def test_held_counts_a_storage_once_and_gradients_too() -> None:
    before = held()
    weight = torch.zeros(1 << 18, requires_grad=True)
    views = [weight.detach()[:10], weight.detach()[10:]]
    assert held() - before == pytest.approx(1.0)
    (weight * 2).sum().backward()
    assert held() - before == pytest.approx(2.0)
    del views


def test_both_systems_see_the_same_rows() -> None:
    assert rows_of(3).shape == (ROWS, LENGTH)
    assert torch.equal(rows_of(3), rows_of(3))
    assert not torch.equal(rows_of(3), rows_of(4))
    assert int(rows_of(3).max()) < VOCABULARY
