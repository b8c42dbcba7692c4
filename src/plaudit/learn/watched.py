"""Keep the log-probs and entropies that the learner computes for sampled rows: records show them to people.

    output, batch -> the loss, unchanged -> WatchedRows, kept until `taken`

This adds no pass. On a GPU, each pass's log-probs, entropies, tokens, lengths and groups are copied to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.algorithms.base import LossFn, Output
from plaudit.batch import Batch
from plaudit.types import Stats

WATCHED = "watched"
"""Name of the part of a rank that is its `Watched`."""


@dataclass(frozen=True, slots=True)
class WatchedRows:
    """Rows of one pass with gradients, with the learner's log-probs and entropies, on the CPU."""

    tokens: Tensor  # (n,)
    lengths: Tensor  # (r,)
    group: Tensor  # (r,)
    logprobs: Tensor  # (n,) 0 where not trained
    entropy: Tensor | None  # (n,)

    def of(self, groups: Tensor) -> WatchedRows:
        """Return the rows of these groups."""
        rows = torch.isin(self.group, groups)
        tokens = rows.repeat_interleave(self.lengths)
        entropy = None if self.entropy is None else self.entropy[tokens]
        return WatchedRows(self.tokens[tokens], self.lengths[rows], self.group[rows], self.logprobs[tokens], entropy)


class Watched:
    """Keeps the sampled rows that watched losses read, until `taken` returns them."""

    def __init__(self) -> None:
        self._seen: list[WatchedRows] = []

    def watching(self, loss: LossFn) -> LossFn:
        """Return a loss of equal value that also keeps sampled rows' log-probs and entropies, if gradients are on."""

        def watched(output: Output, batch: Batch) -> tuple[Tensor, Stats]:
            if output.logprobs is not None and batch.version is not None and torch.is_grad_enabled():
                entropy = None if output.entropy is None else _kept(output.entropy)
                rows = (_kept(batch.tokens), _kept(batch.lengths), _kept(batch.group))
                self._seen.append(WatchedRows(*rows, _kept(output.logprobs), entropy))
            return loss(output, batch)

        return watched

    def taken(self, groups: Sequence[int]) -> list[WatchedRows]:
        """Return the kept rows of these groups, in the order of passes ([] without groups), and forget all rows."""
        rows, self._seen = self._seen, []
        wanted = torch.tensor(groups, dtype=torch.int64)
        return [one.of(wanted) for one in rows if groups]


def _kept(column: Tensor) -> Tensor:
    return column.detach().cpu()
