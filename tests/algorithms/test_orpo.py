"""ORPO by hand, against TRL's formula on padded rows, and where an answer is certain."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LENGTHS, drawn, step
from torch.nn import functional as F

from plaudit import load_settings, run
from plaudit.algorithms.orpo import ORPO
from plaudit.maths.losses import log1mexp, log_odds, odds_ratio


def test_by_hand() -> None:
    # Chosen: p = 1/2, log odds 0; rejected: p = 1/4, log odds -log 3. -log sigma(log 3) = log(4/3). NLL log 2.
    halves = torch.full((sum(LENGTHS),), math.log(0.5), dtype=torch.float64)
    halves[3:4] = halves[6:] = math.log(0.25)
    loss, figures = step(ORPO(odds_weight=0.5), halves)
    assert float(loss) == pytest.approx(math.log(2) + 0.5 * math.log(4 / 3))
    expected = {"loss/policy": float(loss), "nll/chosen": math.log(2), "accuracy": 1.0, "margin": math.log(3)}
    assert figures == pytest.approx(expected)


def test_it_is_what_trl_computes() -> None:
    """ORPOTrainer.odds_ratio_loss of TRL, and the likelihood of the chosen answers' tokens."""
    current = drawn().requires_grad_()
    parts = torch.split(current, LENGTHS)
    chosen, rejected = (torch.stack([part.mean() for part in parts[first::2]]) for first in (0, 1))
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    theirs = -torch.cat(parts[::2]).mean() - (0.1 * F.logsigmoid(odds)).mean()
    mine, _ = step(ORPO(), current)
    assert float(mine.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    gradients = [torch.autograd.grad(loss, current)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-6)
    signs = [part.sign().unique().tolist() for part in torch.split(gradients[0], LENGTHS)]
    assert signs == [[-1.0], [1.0], [-1.0], [1.0]], "chosen answers rise, rejected ones fall"


def test_a_pair_weighs_its_share_in_both_terms() -> None:
    current = drawn()
    whole, _ = step(ORPO(), current)
    first, _ = step(ORPO(), current, weights=(1.0, 0.0))
    second, _ = step(ORPO(), current, weights=(0.0, 1.0))
    likelihood, _ = step(ORPO(odds_weight=0.0), current)
    by_token = -(current[:3].sum() + current[4:6].sum()) / 5
    assert float(likelihood) == pytest.approx(float(by_token), abs=1e-6)
    alone = [step(ORPO(odds_weight=0.0), current, weights=w)[0] for w in ((1.0, 0.0), (0.0, 1.0))]
    odds = float(first + second - sum(alone)) / 2
    assert float(whole - likelihood) == pytest.approx(odds, abs=1e-6)


def test_log_odds_keep_their_digits_and_stay_finite_where_an_answer_is_certain() -> None:
    for x in (-1e-6, -1e-3, -0.6, -0.7, -5.0, -700.0):
        exact = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
        assert float(log1mexp(torch.tensor(x, dtype=torch.float64))) == pytest.approx(exact, rel=1e-12, abs=0)
        single = float(log1mexp(torch.tensor(x)))
        assert single == pytest.approx(exact, rel=1e-5)
    for certain in (0.0, -1e-9):
        mean = torch.tensor([certain, -1.0], requires_grad=True)
        assert float(log_odds(mean)[0].detach()) == pytest.approx(math.log(1e6), rel=1e-3)
        for chosen, rejected in ((0, 1), (1, 0)):
            loss = odds_ratio(mean[chosen], mean[rejected])
            (slope,) = torch.autograd.grad(loss, mean)
            assert bool(torch.isfinite(loss)) and bool(torch.isfinite(slope).all())
            assert float(slope[chosen]) < 0 < float(slope[rejected])


@pytest.mark.parametrize("x", [-1e-4, -0.1, -0.69, -0.7, -3.0, -40.0])
def test_the_slope_of_log_odds_is_one_over_one_minus_p(x: float) -> None:
    mean = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_odds(mean), mean)
    assert float(slope) == pytest.approx(-1 / math.expm1(x), rel=1e-9)


def test_a_whole_run_prefers_the_chosen_answers(make_recipe: Any, tmp_path: Path) -> None:
    done = run(load_settings(make_recipe("orpo", tmp_path, algorithm={"odds_weight": 1.0}, train={"steps": 6})))
    first, last = done.metrics[0], done.metrics[-1]
    assert last["loss/policy"] < first["loss/policy"]
    assert last["nll/chosen"] < first["nll/chosen"]
