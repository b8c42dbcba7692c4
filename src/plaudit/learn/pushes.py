"""What workers and parameter servers send each other: flat numbers in float32, bfloat16 or int8, as bytes.

    numbers + what rounding has kept back -> encode -> bytes -> decode -> rounded numbers

int8 has a float32 scale for each block of 256 numbers: 4.06 bits a number less than bfloat16 has bits more (1-bit SGD:
Seide et al. 2014; blocks: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).
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
    """Runs of nearly equal numbers of blocks, one a server: first and last (excluded) number."""
    each = -(-total // (BLOCK * count)) * BLOCK
    return [(min(number * each, total), min((number + 1) * each, total)) for number in range(count)]


def encode(values: Tensor, push: str) -> Array:
    """Return float32 numbers, (n,), as bytes of their own."""
    if push == "float32":
        return _bytes(values.clone())
    if push == "bfloat16":
        return _bytes(values.bfloat16())
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)  # (blocks,)
    steps = (blocks / scales[:, None]).round_().to(torch.int8).view(-1)[: len(values)]
    return np.concatenate([_bytes(scales), _bytes(steps)])


def decode(message: Array, push: str) -> Tensor:
    """Return the numbers of a message; they may share its memory."""
    if not len(message):  # a server more than there are blocks
        return torch.zeros(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # shared memory is handed over read-only
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
    """Encodes numbers and adds to the next ones what rounding has kept back of these, so that no error adds up."""

    def __init__(self, size: int, push: str):
        self.push, self.carried = push, torch.zeros(0 if push == "float32" else size)
        self._before: Tensor | None = None

    def encode(self, values: Tensor, runs: list[tuple[int, int]]) -> list[Array]:
        """Return the message of each run. Call `settle` once all messages of a step were made."""
        if self.push == "float32":
            return [encode(values[start:stop], self.push) for start, stop in runs]
        self._before = self.carried if self._before is None else self._before
        values = values + self.carried
        messages = [encode(values[start:stop], self.push) for start, stop in runs]
        self.carried = values - torch.cat([decode(message, self.push) for message in messages])
        return messages

    def settle(self, taken: bool) -> None:
        """If the messages were not taken, forget them: numbers that are not finite must not be carried on."""
        if self._before is not None and not taken:
            self.carried = self._before
        self._before = None
