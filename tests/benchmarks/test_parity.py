"""The comparison with TRL notices a wrong loss, gradient or estimator; TRL itself is needed by `make parity` only."""

from __future__ import annotations

from functools import partial

import parity
import pytest
import torch
from parity_problem import problem
from torch import Tensor

from plaudit.algorithms.dpo import DPO
from plaudit.algorithms.kto import KTO

PROBLEMS = [problem(0, extreme=False), problem(1, extreme=True)]


def found(ours: parity.Side, theirs: parity.Side) -> bool:
    case = parity.Case(name="a loss", peer="itself", ours=ours, theirs=theirs)
    return parity.failed(case, parity.compare(case, PROBLEMS, loss=True))


def test_a_loss_agrees_with_itself() -> None:
    same = partial(parity.ours, KTO())
    assert not found(same, same)


@pytest.mark.parametrize("factor", [1.0 + 1e-5, float("nan")])
def test_a_wrong_value_fails(factor: float) -> None:
    right = partial(parity.ours, DPO())
    assert found(lambda given, current: right(given, current) * factor, right)


def test_a_wrong_gradient_fails_where_the_value_is_right() -> None:
    right = partial(parity.ours, DPO())

    def wrong(given: parity.Problem, current: Tensor) -> Tensor:
        loss = right(given, current)
        return loss.detach() + (loss - loss.detach()) * 1.001

    assert found(wrong, right)


def test_padding_of_the_problems_does_not_count() -> None:
    given = PROBLEMS[0]
    current = given.current(given.weights)
    changed = torch.where(given.mask, current, current - 5.0)
    assert not given.mask.all()
    assert torch.equal(parity.ours(DPO(), given, current), parity.ours(DPO(), given, changed))
