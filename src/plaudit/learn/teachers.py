"""Teachers of different rows, in the reference's place.

Batch with the number of each row's teacher -> its own rows for each Scorer -> reference log-probs of all
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plaudit.batch import Batch
from plaudit.learn.columns import Annotations
from plaudit.learn.scorer import Scorer


class Teachers(Scorer):
    """Several frozen models in the reference's place, numbered from 0: each runs over the rows that are its own."""

    def __init__(self, scorers: Sequence[Scorer]):
        first = scorers[0]
        super().__init__(first.model, first.role, token_budget=first.budget, placement=first.placement)
        self.scorers = scorers

    def columns(self, batch: Batch) -> Annotations:
        batch, whole = batch.landed(), Annotations()
        if batch.teacher is None:
            return self.scorers[0].columns(batch)
        for number, scorer in enumerate(self.scorers):
            own = batch.teacher == number
            rows = own.nonzero()[:, 0] if own.any() else torch.tensor([0])  # ranks take part in each model's passes
            for name, column in scorer.columns(batch.select(rows)).items():
                filled = whole.setdefault(name, column.new_zeros(len(batch.tokens)))
                if own.any():
                    filled[own[batch.row]] = column
        return whole

    def sound(self, whole: bool) -> bool:
        return all(scorer.sound(whole) for scorer in self.scorers)
