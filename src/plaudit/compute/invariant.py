"""Products of inference whose rows do not depend, to the last bit, on the rows computed beside them.

Matrix products use another kernel, with another order of additions, for a few left-over rows. Without gradients, rows
are therefore filled up to multiples that use only whole kernels. Attention and elementwise operations of our own
kernels need no filling. A sequence's log-probs, its cache and its next token are then the same with any neighbours.
Rollouts may move between workers, and lost ones can be asked again, without a trace.

This holds on the CPU with our kernels, for the libraries that `products.py` chooses from
(tests/rollout/test_invariant.py). Torch's attention and elementwise operations depend on their neighbours in the last
bits. GPU libraries choose kernels by size in their own ways, so nothing is filled up there. With gradients nothing is
filled up either: the whole batch is then the same for any arrangement of workers. (`few` limits the number of rows in a
pass for speed only.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.compute.products import product

ROWS = 4
"""Rows of a matrix product that a kernel takes together, for each thread that shares it."""


def filled_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def few(count: int, *, digits: int = 6) -> int:
    """Round `count` up to a number with zeros after its first `digits` binary digits: at most 3 % more, with two digits
    50 %. For each number of rows that it has not seen recently, oneDNN compiles a kernel, in 1 to 5 ms a product."""
    return filled_up(count, 1 << max(0, count.bit_length() - digits))


def filled(x: Tensor) -> Tensor:
    """Return x (rows, width) with rows of zeros added if no gradients are kept, so that every kernel is a whole one."""
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return x
    missing = filled_up(x.shape[0], ROWS * torch.get_num_threads()) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, width) times weight.T; without gradients, each row is computed as if it were alone."""
    whole = filled(x)
    out = product(whole, weight, bias, alone=not torch.is_grad_enabled())
    return out if whole is x else out[: x.shape[0]]


class Linear(nn.Linear):
    """nn.Linear that computes with `linear`."""

    def reset_parameters(self) -> None:
        """Set random values, except on the meta device, which holds none: torch would load its compiler for them."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def product(self, input: Tensor) -> Tensor:
        """As `forward`, without the bias."""
        return linear(input, self.weight)
