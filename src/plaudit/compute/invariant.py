"""Batch-invariant products for inference: a row's result does not depend, to the last bit, on the other rows.

Matrix products use another kernel, with another order of additions, for a few left-over rows. Without gradients, rows
are therefore padded to multiples that use only whole kernels. Attention and elementwise operations of our own kernels
need no padding. A sequence's log-probs, its KV cache and its next token are then the same in any batch. Rollouts may
move between workers, and lost ones can be sampled again, with the same results.

This holds on the CPU with our kernels, for the libraries that `products.py` chooses from
(tests/rollout/test_invariant.py). Torch's attention and elementwise operations depend on their neighbours in the last
bits. GPU libraries choose kernels by size in their own ways, so nothing is padded there. With gradients nothing is
padded either: the whole batch is then the same for any arrangement of workers. (`few` rounds the number of rows in a
pass for speed only.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.compute.products import product

ROWS = 4
"""Rows that a matrix kernel computes together, per thread: row counts are padded to multiples of ROWS * threads."""


def filled_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def few(count: int, *, digits: int = 6) -> int:
    """Round `count` up to a number with zeros after its first `digits` binary digits: at most 3 % more, with two digits
    50 %. For each number of rows that it has not seen recently, oneDNN compiles a kernel, in 1 to 5 ms a product."""
    return filled_up(count, 1 << max(0, count.bit_length() - digits))


def filled(x: Tensor) -> Tensor:
    """Return x (rows, width); on the CPU without gradients, rows of zeros are added so that only whole kernels run."""
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return x
    missing = filled_up(x.shape[0], ROWS * torch.get_num_threads()) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (rows, width) @ weight.T + bias; without gradients, a row's result does not depend on other rows."""
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
        """Compute as `forward`, without the bias."""
        return linear(input, self.weight)
