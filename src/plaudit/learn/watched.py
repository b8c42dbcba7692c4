"""What the learner computes for each token of sampled rows, kept while it learns: records show it to people.

    output, batch -> the loss, unchanged -> Seen, until it is taken

It costs a copy of two numbers a token and no pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Output
from plaudit.batch import Batch
from plaudit.types import Stats

WATCHED = "watched"
"""Name of a rank's part."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows that a loss was computed of, on the CPU."""

    tokens: Tensor  # (n,)
    lengths: Tensor  # (r,)
    group: Tensor  # (r,)
    logprobs: Tensor  # (n,) 0 where not trained
    entropy: Tensor | None  # (n,)


class Watched:
    """Keeps what losses read, from one `taken` to the next."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []

    def watching(self, loss: LossFn) -> LossFn:
        """Return the same loss, which also keeps what it reads of sampled rows."""

        def watched(output: Output, batch: Batch) -> tuple[Tensor, Stats]:
            if output.logprobs is not None and batch.version is not None and torch.is_grad_enabled():
                entropy = None if output.entropy is None else _kept(output.entropy)
                rows = (_kept(batch.tokens), _kept(batch.lengths), _kept(batch.group))
                self._seen.append(Seen(*rows, _kept(output.logprobs), entropy))
            return loss(output, batch)

        return watched

    def taken(self) -> list[Seen]:
        """Return what was kept, in the order of passes, and forget it."""
        seen, self._seen = self._seen, []
        return seen


def _kept(column: Tensor) -> Tensor:
    return column.detach().cpu()
