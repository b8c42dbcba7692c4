"""Inference whose results do not depend, to the last bit, on what else is computed beside them.

Matrix products choose another kernel, with another order of additions, for a few left-over rows; attention does for
left-over keys. Without gradients, rows and keys are therefore filled up to multiples at which every kernel is a whole
one, and threads are given whole rows, so that a sequence's log-probs, its cache and its next token are the same
whatever the engine, the scorer or the worker has beside it: rollouts may move between workers, and lost ones be asked
again, without a trace. This holds for torch's CPU kernels (tests/rollout/test_invariant.py); GPU libraries choose
kernels by size in ways of their own, so nothing is filled up there.

With gradients nothing is filled up: the whole batch is the same then however workers are arranged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assent.maths.products import product

ROWS = 4
"""Rows of a matrix product that a kernel takes at once, for each thread that shares it."""
KEYS = 16
"""Keys of an attention call that a kernel takes at once."""
GRAIN = 32768
"""Entries of an elementwise operation below which torch leaves it to one thread."""


def filled_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def few(count: int, *, digits: int = 6) -> int:
    """The next of few numbers at or above `count`, those with zeros behind `digits` binary digits: at most 3 % above,
    with two digits 50 %. For each number of rows that it has not met of late, oneDNN compiles a kernel, in 1 to 5 ms a
    product."""
    return filled_up(count, 1 << max(0, count.bit_length() - digits))


def keys(count: int, device: torch.device) -> int:
    """How many keys attention over `count` is computed over."""
    return count if torch.is_grad_enabled() or device.type != "cpu" else filled_up(count, KEYS)


def filled(x: Tensor) -> Tensor:
    """x (rows, width), with more rows of zeros where no gradients are kept, so that every kernel is a whole one."""
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return x
    missing = filled_up(x.shape[0], ROWS * torch.get_num_threads()) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, width) times weight.T, each row as if it were alone where no gradients are kept."""
    whole = filled(x)
    out = product(whole, weight, bias)
    return out if whole is x else out[: x.shape[0]]


def entrywise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x (rows, width), each row as if it were alone where no gradients are kept. Give it filled rows.

    Threads share an elementwise operation by entries. The last ones of a share, which fill no register, are computed by
    another formula (of exp, say), so a share must not end within a row."""
    threads = torch.get_num_threads()
    if threads == 1 or torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() < GRAIN:
        return function(x)
    all_share = threads == 2 or x.numel() >= 2 * threads * GRAIN
    if x.shape[0] % threads == 0 and all_share:
        return function(x)
    alone = torch.split(x, max(1, (GRAIN - 1) // x.shape[1]))
    return torch.cat([function(rows) for rows in alone])


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def reset_parameters(self) -> None:
        """Random values, but not on the meta device: it holds none, and torch loads its compiler to make none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
