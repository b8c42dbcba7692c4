"""Inference whose results do not depend, to the last bit, on what else is computed beside them.

Matrix products choose another kernel, with another order of additions, for a few left-over rows; attention does for
left-over keys. Without gradients, rows and keys are therefore filled up to multiples at which every kernel is a whole
one, and threads are given whole rows, so that a sequence's log-probs, its cache and its next token are the same
whatever the engine, the scorer or the worker has beside it: rollouts may move between workers, and lost ones be asked
again, without a trace. This holds on the CPU for the libraries that `products.py` chooses among
(tests/rollout/test_invariant.py), but not in bfloat16 on processors with matrix registers (AMX) without a C++ compiler.
GPU libraries choose kernels by size in ways of their own, so nothing is filled up there.

With gradients nothing is filled up here: the whole batch is the same then however workers are arranged. (That the
number of rows in a pass is one of `few` is for speed alone.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.maths.products import product

ROWS = 4
"""Rows of a matrix product that a kernel takes at once, for each thread that shares it."""
KEYS = 16
"""Keys of an attention call that a kernel takes at once."""
LONG = 192
"""Keys from which on the order of additions in attention goes by how many there are, and not by those seen alone."""
GRAIN = 32768
"""Entries of an elementwise operation below which torch leaves it to one thread."""
REGISTERS = 64
"""Entries that a loop takes at once: two registers of 512 bits in bfloat16, and half as many in float32."""


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


def company(count: int, device: torch.device) -> int:
    """Rows of so many keys may be attended to in one call with those of which this is the same."""
    found = keys(count, device)
    return found if found >= LONG and not torch.is_grad_enabled() and device.type == "cpu" else 0


def filled(x: Tensor) -> Tensor:
    """x (rows, width), with more rows of zeros where no gradients are kept, so that every kernel is a whole one."""
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return x
    missing = filled_up(x.shape[0], ROWS * torch.get_num_threads()) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (rows, width) times weight.T, each row as if it were alone where no gradients are kept."""
    whole = filled(x)
    out = product(whole, weight, bias, alone=not torch.is_grad_enabled())
    return out if whole is x else out[: x.shape[0]]


def entrywise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x (rows, width), each row as if it were alone where no gradients are kept.

    Threads share an elementwise operation by entries. The last ones of a share, which fill no register, are computed by
    another formula (of exp, say), so shares must end where a row and a register end."""
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return function(x)
    rows, width = x.shape
    missing = filled_up(rows, whole_rows(width)) - rows
    parts = torch.split(F.pad(x, (0, 0, 0, missing)) if missing else x, shared_rows(rows + missing, width))
    out = function(parts[0]) if len(parts) == 1 else torch.cat([function(part) for part in parts])
    return out[:rows] if missing else out


def whole_rows(width: int) -> int:
    """The fewest rows that end with a register."""
    return REGISTERS // math.gcd(REGISTERS, width)


def shared_rows(rows: int, width: int) -> list[int]:
    """Cuts `rows` (whole registers) into runs that either all threads share evenly, or one thread has to itself. An
    operation may read all of a row, or half of it at a time."""
    threads, whole = torch.get_num_threads(), whole_rows(width)
    if threads == 1:
        return [rows]
    even = rows // (whole * threads) * whole * threads
    runs = [even] if even > 2 * (threads - 1) * GRAIN // width else []
    rows -= sum(runs)
    alone = max((GRAIN - 1) // width // whole, 1) * whole
    return runs + [min(alone, rows - start) for start in range(0, rows, alone)]


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def reset_parameters(self) -> None:
        """Random values, but not on the meta device: it holds none, and torch loads its compiler to make none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
