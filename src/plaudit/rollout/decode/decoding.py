"""The drafts (completions being sampled) that are decoded together, their cache and their passes through the model.

    drafts that join -> logits of all rows; drawn tokens -> rows; rows that end -> gaps are closed

Left out: which drafts join, and how tokens are drawn. The engine decides both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plaudit.models.decoder import Decoder
from plaudit.rollout.accepted import take_weights
from plaudit.rollout.decode.forward import Forward
from plaudit.rollout.decode.graphs import Record
from plaudit.rollout.decode.kept import Kept
from plaudit.rollout.decode.table import Table
from plaudit.rollout.queued import Draft
from plaudit.runtime.memory import memory_tried


@dataclass(slots=True)
class Admission:
    """Drafts (completions being sampled) that start in the same decoding step, in the rows after the running ones."""

    drafts: list[Draft] = field(default_factory=list)
    resumed: int = 0
    """Number of the first drafts, which go on from their episodes' last turns."""
    fresh: list[int] = field(default_factory=list)
    """Rows whose prompt is computed now."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs: the row that holds a prompt, and the row that needs it."""


class Decoding:
    """Runs all drafts' passes, the same in each process that holds part of the model. `recorder`: as in `Forward`."""

    def __init__(self, model: Decoder, recorder: Callable[[torch.device], Record] | None = None):
        self.model, self.forward = model, Forward(model, recorder)
        self.table: Table | None = None
        self.kept = Kept()

    @property
    def running(self) -> int:
        return len(self.table.drafts) if self.table else 0

    @torch.no_grad()
    def logits(self, new: Admission, slots: int) -> tuple[Table, Tensor]:
        """Start the drafts that join. Return the table, and logits (rows, vocab): after the last token of each row that
        ran before or is resumed, then after the prompt of each row in `new.fresh`."""
        running = self.running
        table = self.table = self._joined(new.drafts, slots)
        if new.resumed:
            table.resume(running, [self.kept.take(draft) for draft in new.drafts[: new.resumed]])
        logits = self.forward.logits(table, running + new.resumed, new.fresh)
        if new.drafts:
            table.start(running + new.resumed, new.copies)
        return table, logits

    def _joined(self, drafts: list[Draft], slots: int) -> Table:
        """Return the table with these drafts; make a new table if none runs and the model's precision has changed."""
        model, table = self.model, self.table
        if table is None or (not self.running and table.dtype is not model.dtype):
            table = Table(model.sizes, slots, drafts, dtype=model.dtype, device=model.device)
        if drafts:
            table.join(drafts)
        return table

    def drawn(self, tokens: Tensor, given: Sequence[int]) -> None:
        """Store each row's newest token (rows,) in the table; in the rows `given` it is the prompt's. The engine, or
        `Follower`, notes it in the drafts."""
        assert self.table is not None
        self.table.rows.drawn(tokens, given)

    def keep(self, rows: Collection[int], most: int) -> None:
        """Keep the caches of these rows, whose drafts have ended, for their episodes' next turns: at most `most`."""
        assert self.table is not None
        with memory_tried() as failed:
            for row in rows:
                draft = self.table.drafts[row]
                self.kept.put(draft, self.table.cache.taken(row, draft.length - 1), most)
        if failed:  # answers need the memory more
            self.kept = Kept()

    def drop(self) -> None:
        """Keep no turn any longer."""
        self.kept = Kept()

    def remove(self, rows: Collection[int]) -> None:
        if self.table and rows:
            self.table.remove(rows)

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy published weights into the model. Rows keep their cache."""
        take_weights(self.model, weights)

    def forget(self) -> None:
        """Drop all drafts, and free the memory of cache and recordings; the next step allocates it again."""
        self.table, self.kept = None, Kept()
        self.forward.forget()
