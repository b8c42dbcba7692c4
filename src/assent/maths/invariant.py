"""Inference whose results do not depend, to the last bit, on what else is computed beside them.

Matrix products choose another kernel, with another order of additions, for a few left-over rows; attention does for
left-over keys. Without gradients, rows and keys are therefore filled up to multiples at which every kernel is a whole
one, so that a sequence's log-probs, its cache and its next token are the same whatever the engine, the scorer or the
worker has beside it: rollouts may move between workers, and lost ones be asked again, without a trace. This holds for
torch's CPU kernels (tests/rollout/test_invariant.py); GPU libraries choose kernels by size in ways of their own.

With gradients nothing is filled up: the whole batch is the same then however workers are arranged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assent.maths.products import product

ROWS = 4
"""Rows of a matrix product that a kernel takes at once, for each thread that shares it."""
KEYS = 16
"""Keys of an attention call that a kernel takes at once."""


def filled_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def keys(count: int) -> int:
    """How many keys attention over `count` is computed over."""
    return count if torch.is_grad_enabled() else filled_up(count, KEYS)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, width) times weight.T, each row as if it were alone where no gradients are kept."""
    if torch.is_grad_enabled():
        return product(x, weight, bias)
    rows = x.shape[0]
    whole = filled_up(rows, ROWS * torch.get_num_threads())
    if whole == rows:
        return product(x, weight, bias)
    return product(F.pad(x, (0, 0, 0, whole - rows)), weight, bias)[:rows]


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def reset_parameters(self) -> None:
        """Random values, but not on the meta device: it holds none, and torch loads its compiler to make none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
