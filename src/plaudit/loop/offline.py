"""Batches from rows that were read before training: SFT, reward models, DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch

from plaudit.batch import Batch
from plaudit.data.cursor import Cursor
from plaudit.data.store import References, Writer
from plaudit.loop.models import Models
from plaudit.loop.progress import Delivery
from plaudit.types import Row

Item = tuple[Row, ...]
"""The rows of one demonstration, or of all pairs of one prompt."""


class OfflineSource:
    """Take `batch_size` items at a time in the cursor's order; an epoch's last batch may be smaller."""

    def __init__(self, items: Sequence[Item], cursor: Cursor, *, batch_size: int, unit: int):
        self.items, self.cursor = items, cursor
        self.batch_size, self.unit = batch_size, unit
        self.draw = 0

    async def next(self) -> Delivery:
        epoch = self.draw // self.cursor.length
        end = min(self.draw + self.batch_size, (epoch + 1) * self.cursor.length)
        rows = [row for draw in range(self.draw, end) for row in self.items[self.cursor.item(draw)]]
        self.draw = end
        done = end / self.cursor.length
        return Delivery(batch=Batch.of(rows, unit=self.unit), epoch=epoch + 1, epochs_done=done)

    async def done(self, delivery: Delivery) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {"draw": self.draw}

    def restore(self, state: dict[str, Any]) -> None:
        self.draw = int(state["draw"])

    async def close(self) -> None:
        return None


class WithReference(Sequence[Item]):
    """Items with reference log-probs added to their rows when they are read."""

    def __init__(self, items: Sequence[Item], references: Sequence[tuple[tuple[float, ...], ...]]):
        self.items, self.references = items, references

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> WithReference: ...
    def __getitem__(self, index: int | slice) -> Item | WithReference:
        if isinstance(index, slice):
            return WithReference(self.items[index], self.references[index])
        pairs = zip(self.items[index], self.references[index], strict=True)
        return tuple(replace(row, reference=reference) for row, reference in pairs)


async def with_reference(items: Sequence[Item], models: Models, *, unit: int, at_once: int = 1 << 22) -> WithReference:
    """Compute the reference log-probs of all rows before training, about `at_once` tokens at a time, and keep them in
    the same storage as items."""
    writer = Writer(References())
    waiting: list[Item] = []
    tokens = 0

    async def compute() -> None:
        batch = await models.annotate(Batch.of([row for item in waiting for row in item], unit=unit))
        assert batch.reference is not None
        columns = (tuple(column.tolist()) for column in torch.split(batch.reference, batch.lengths.tolist()))
        writer.add([tuple(next(columns) for _ in item) for item in waiting])

    for item in items:
        waiting.append(item)
        tokens += sum(len(row.tokens) for row in item)
        if tokens >= at_once:
            await compute()
            waiting.clear()
            tokens = 0
    if waiting:
        await compute()
    return WithReference(items, writer.items())
