"""Gathering rows: what comes out, and how gradients are added up."""

from __future__ import annotations

import pytest
import torch

from plaudit.compute.gather import Reading, gathered


def test_rows_and_their_gradients_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    out = gathered(x, Reading(torch.tensor([2, 0, 2]), 3))
    assert out.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    out.backward(torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]))
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]  # nobody read the second row


def test_reads_that_are_not_real_send_nothing_back() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    reading = Reading(torch.tensor([0, 0, 1]), 2, real=torch.tensor([True, False, True]))
    gathered(x, reading).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_torchs_own_gather(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 8, generator=generator).to(dtype)
    index = torch.randint(40, (100,), generator=generator)
    above = torch.randn(100, 3, 8, generator=generator).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    gathered(ours, Reading(index, 40)).backward(above)
    theirs.index_select(0, index).backward(above.double())
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


def test_no_reads_at_all() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    gathered(x, Reading(torch.tensor([], dtype=torch.int64), 2)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0] * 3] * 2
