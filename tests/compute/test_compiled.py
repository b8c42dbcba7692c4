"""What torch compiles for a GPU: that it can trace it whole, once for all numbers of rows, and what is said if not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounter

from plaudit.compute import compiled, fused, logprobs
from plaudit.compute.compiled import by_compiler

pytestmark = pytest.mark.slow
VOCAB = 11


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def projected(rows: int) -> Tensor:
    """A view such as a query's, whose rows are parts of longer ones."""
    return drawn(rows, 24).view(rows, 3, 8)[:, :2]


def chosen(rows: int) -> tuple[Tensor, float, Tensor]:
    return drawn(rows, VOCAB).detach(), 0.7, torch.arange(rows) % VOCAB


CASES: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    "swiglu": (fused._swiglu, lambda n: (drawn(n, 16),)),
    "rotated": (fused._rotated, lambda n: (projected(n), torch.rand(n, 1, 4), torch.rand(n, 1, 4))),
    "figures": (logprobs._figures, lambda n: (chosen(n)[0], chosen(n)[2], 0.7)),
    "slope": (logprobs._slope, lambda n: (*chosen(n), *torch.rand(3, n), None)),
    "slope-entropy": (logprobs._slope, lambda n: (*chosen(n), *torch.rand(4, n))),
}


@pytest.mark.parametrize("name", CASES)
def test_is_traced_whole_and_once(name: str) -> None:
    function, given = CASES[name]
    torch._dynamo.reset()
    counter = CompileCounter()
    fast = torch.compile(function.__wrapped__, backend=counter, fullgraph=True)
    for rows in (5, 9, 300):
        torch.manual_seed(rows)
        arguments = given(rows)
        torch.testing.assert_close(by_compiler(fast, function, *arguments), function(*arguments))
    assert counter.frame_count == 1


def test_a_compiler_that_fails_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "_refused", [])

    def fails(x: Tensor) -> Tensor:
        raise TorchDynamoException("no ptxas")

    with caplog.at_level(logging.WARNING):
        assert float(by_compiler(fails, torch.negative, torch.tensor(2.0))) == -2.0
    assert "no ptxas" in caplog.text
    assert "PLAUDIT_TORCH_COMPILE=off" in caplog.text
    assert compiled._refused == ["no ptxas"]
