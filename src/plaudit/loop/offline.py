"""Batches from rows that were read before training: SFT, reward models, DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from plaudit.batch import Batch
from plaudit.data.cursor import Cursor
from plaudit.loop.cast import Cast
from plaudit.loop.progress import Delivery
from plaudit.types import Row

Item = tuple[Row, ...]
"""The rows of one demonstration, or of all pairs of one prompt."""


class OfflineSource:
    """Takes `batch_size` items at a time in the cursor's order; an epoch's last batch may be smaller."""

    def __init__(self, items: Sequence[Item], cursor: Cursor, *, batch_size: int, unit: int):
        self.items, self.cursor = items, cursor
        self.batch_size, self.unit = batch_size, unit
        self.draw = 0

    async def next(self) -> Delivery:
        epoch = self.draw // self.cursor.length
        end = min(self.draw + self.batch_size, (epoch + 1) * self.cursor.length)
        rows = [row for draw in range(self.draw, end) for row in self.items[self.cursor.item(draw)]]
        self.draw = end
        done = end // self.cursor.length
        return Delivery(batch=Batch.of(rows, unit=self.unit), epoch=epoch + 1, epochs_done=done)

    async def done(self, delivery: Delivery) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {"draw": self.draw}

    def restore(self, state: dict[str, Any]) -> None:
        self.draw = int(state["draw"])

    async def close(self) -> None:
        return None


async def with_reference(items: Sequence[Item], cast: Cast, *, unit: int) -> list[Item]:
    """Every row with its reference log-probs, computed in one pass before training."""
    batch = await cast.annotate(Batch.of([row for item in items for row in item], unit=unit))
    assert batch.reference is not None
    columns = iter(torch.split(batch.reference, batch.lengths.tolist()))
    return [tuple(replace(row, reference=tuple(next(columns).tolist())) for row in item) for item in items]
