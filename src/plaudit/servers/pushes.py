"""What workers and parameter servers send each other: flat numbers in float32, bfloat16 or int8, as bytes.

    numbers + rounding errors of the last step -> encode -> bytes -> decode -> rounded numbers

int8 has a float32 scale for each block of 256 numbers, so 8.125 bits a number (error feedback: 1-bit SGD, Seide et al.
2014; blocks: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Array = np.ndarray[Any, np.dtype[np.uint8]]
BLOCK = 256
"""Numbers that share a scale; servers hold whole blocks, so that their number changes no bit."""


def cuts(total: int, count: int) -> list[tuple[int, int]]:
    """Cut `total` numbers into a run per server, (start, stop), of whole blocks; last runs may be shorter or empty."""
    each = -(-total // (BLOCK * count)) * BLOCK
    return [(min(number * each, total), min((number + 1) * each, total)) for number in range(count)]


def encode(values: Tensor, push: str) -> Array:
    """Return float32 numbers (n,) as bytes in the format `push`; they share no memory."""
    if push == "float32":
        return _bytes(values.clone())
    if push == "bfloat16":
        return _bytes(values.bfloat16())
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)  # (blocks,)
    steps = (blocks / scales[:, None]).round_().to(torch.int8).view(-1)[: len(values)]
    return np.concatenate([_bytes(scales), _bytes(steps)])


def decode(message: Array, push: str) -> Tensor:
    """Return a message's numbers in float32; they may share its memory."""
    if not len(message):  # more servers than blocks: this one has none
        return torch.zeros(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # arrays in shared memory are read-only
        found = torch.from_numpy(message)
    if push == "float32":
        return found.view(torch.float32)
    if push == "bfloat16":
        return found.view(torch.bfloat16).float()
    count = -(-len(found) // (BLOCK + 4))
    scales, steps = found[: 4 * count].view(torch.float32), found[4 * count :].view(torch.int8)
    blocks = F.pad(steps, (0, -len(steps) % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return blocks.view(-1)[: len(steps)]


def _bytes(values: Tensor) -> Array:
    found: Array = values.contiguous().view(torch.uint8).numpy()
    return found


class Feedback:
    """Encodes numbers. Each step's rounding errors are added to the next step's numbers, so that they do not add up."""

    def __init__(self, size: int, push: str):
        self.push, self.carried = push, torch.zeros(0 if push == "float32" else size)
        self._before: Tensor | None = None

    def encode(self, values: Tensor, runs: list[tuple[int, int]]) -> list[Array]:
        """Return a message for each run of `values`. Call `settle` after all messages of a step."""
        if self.push == "float32":
            return [encode(values[start:stop], self.push) for start, stop in runs]
        self._before = self.carried if self._before is None else self._before
        values = values + self.carried
        messages = [encode(values[start:stop], self.push) for start, stop in runs]
        self.carried = values - torch.cat([decode(message, self.push) for message in messages])
        return messages

    def settle(self, taken: bool) -> None:
        """End the step. If its messages were not taken, drop their rounding errors, which may not be finite."""
        if self._before is not None and not taken:
            self.carried = self._before
        self._before = None
