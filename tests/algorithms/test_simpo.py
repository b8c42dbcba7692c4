"""SimPO by hand, against TRL's formula on padded rows, and by what must not change it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LENGTHS, drawn, step
from torch.nn import functional as F

from plaudit import load_settings, run
from plaudit.algorithms.simpo import SimPO


def test_by_hand() -> None:
    # Means -1 and -2, then -3 and -2; beta 2, gamma 1: -log sigma(2 - 1) = 0.313262, -log sigma(-2 - 1) = 3.048587.
    current = torch.tensor([-1.5, -0.5, -1.0, -2.0, -4.0, -2.0, -1.0, -2.0, -2.0, -3.0], dtype=torch.float64)
    loss, figures = step(SimPO(), current)
    assert float(loss) == pytest.approx((0.313262 + 3.048587) / 2, abs=1e-6)
    imitated = (1.5 + 0.5 + 1.0 + 4.0 + 2.0) / 5  # over the tokens of both chosen answers
    told = {"loss/policy": float(loss), "nll/chosen": imitated, "accuracy": 0.5, "margin": 0.0}
    assert figures == pytest.approx(told)
    loss, _ = step(SimPO(), current, weights=(1.0, 0.5))
    assert float(loss) == pytest.approx((0.313262 + 0.5 * 3.048587) / 1.5, abs=1e-6)
    loss, _ = step(SimPO(likelihood_weight=0.25), current)
    assert float(loss) == pytest.approx((0.313262 + 3.048587) / 2 + 0.25 * imitated, abs=1e-6)


@pytest.mark.parametrize("method", [SimPO(), SimPO(beta=2.5, target_margin=1.4), SimPO(likelihood_weight=0.7)])
def test_it_is_what_trl_computes(method: SimPO) -> None:
    """CPOTrainer of TRL with loss_type=simpo, whose simpo_gamma is the target margin and cpo_alpha the likelihood's."""
    current = drawn().requires_grad_()
    parts = torch.split(current, LENGTHS)
    chosen, rejected = (torch.stack([part.mean() for part in parts[first::2]]) for first in (0, 1))
    logits = (chosen - rejected) - method.target_margin / method.beta
    theirs = -F.logsigmoid(method.beta * logits).mean() - method.likelihood_weight * torch.cat(parts[::2]).mean()
    mine, _ = step(method, current)
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    gradients = [torch.autograd.grad(loss, current)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)
    signs = [part.sign().unique().tolist() for part in torch.split(gradients[0], LENGTHS)]
    assert signs == [[-1.0], [1.0], [-1.0], [1.0]], "chosen answers rise, rejected ones fall"


def test_length_and_a_common_shift_change_nothing() -> None:
    current = drawn()
    whole, figures = step(SimPO(), current)
    shifted, _ = step(SimPO(), current - 3.0)
    assert float(shifted) == pytest.approx(float(whole), abs=1e-6)
    even = torch.cat([part.mean().expand(len(part)) for part in torch.split(current, LENGTHS)])
    assert float(step(SimPO(), even)[0]) == pytest.approx(float(whole), abs=1e-6)
    zero, _ = step(SimPO(target_margin=0.0), torch.zeros_like(current))
    assert float(zero) == pytest.approx(math.log(2))
    assert step(SimPO(beta=4.0), current)[1]["margin"] == pytest.approx(2 * figures["margin"])


def test_a_whole_run_prefers_the_chosen_answers(make_recipe: Any, tmp_path: Path) -> None:
    more = {"train": {"steps": 8, "batch_size": 16}, "data": {"max_pairs_per_prompt": 9}}
    done = run(load_settings(make_recipe("simpo", tmp_path, **more)))
    first, last = done.metrics[0], done.metrics[-1]
    assert last["loss/policy"] < first["loss/policy"]
    assert last["margin"] > first["margin"]
