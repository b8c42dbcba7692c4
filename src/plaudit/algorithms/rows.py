"""From responses to rows, and back from a batch's rows to its answers.

Group, Response -> rows_of -> Row, or several for an episode whose earlier turns were rewritten
Batch -> Answers -> the answer of each token; rewards by answer
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plaudit.batch import Batch
from plaudit.types import Group, Numbers, Response, Row
from plaudit.types.distant import joined


def rows_of(group: Group, response: Response, *, baseline: float = 0.0) -> list[Row]:
    """Return the rows of a response: one, and one more for each restart of an episode. What precedes an answer is not
    trained, with log-probs 0 and version -1."""
    known = response.reward is not None or response.continues or not response.score.applicable
    assert known, "a response whose reward failed or is masked has no row"
    reward = sum(reward for _, reward in response.process) if response.reward is None else response.reward
    rows, answer = list[Row](), response.completion
    whole = [(group.prompt.tokens, slice(None))]
    for prefix, part in whole if answer.episode is None else answer.episode.sequences(group.prompt.tokens):
        before, (first, last, _) = len(prefix), part.indices(len(answer.tokens))
        row = Row(
            tokens=joined(Numbers("i", prefix), response.tokens[part]),
            trainable=joined(Numbers("b", bytes(before)), response.trainable[part]),
            group=group.index,
            further=bool(rows),
            logprobs=joined(Numbers("f", bytes(4 * before)), answer.logprobs[part]),
            versions=joined(Numbers("i", [-1] * before), answer.versions[part]),
            reward=reward,
            process=tuple((before + at - first, one) for at, one in response.process if first <= at < last),
            baseline=baseline,
            continues=response.continues,
        )
        rows.append(row)
    return rows


def row_of(group: Group, response: Response, *, baseline: float = 0.0) -> Row:
    """Return the row of a response of one row."""
    (row,) = rows_of(group, response, baseline=baseline)
    return row


def pickable(responses: Sequence[Response]) -> list[Response]:
    """Return the responses without episodes of several rows, for methods that compare answers row by row."""
    parts = [(one, one.completion.episode) for one in responses]
    return [one for one, episode in parts if episode is None or all(start == 0 for start, _ in episode.restarts)]


class Answers:
    """The answers of a batch, `count` in number: each row is one, or the rows of an episode together. `token` (n,) and
    `row` (r,) have the number of each token's and each row's answer, from 0 on."""

    def __init__(self, batch: Batch):
        self.token, self.row, self.count = batch.row, torch.arange(len(batch)), len(batch)
        self._last: Tensor | None = None
        if batch.episode is not None:
            self.row = torch.unique(batch.episode, return_inverse=True)[1]
            self.token, self.count = self.row[batch.row], int(self.row.max()) + 1
            self._last = torch.zeros(self.count, dtype=torch.int64).scatter_reduce(
                0, self.row, torch.arange(len(batch)), "amax"
            )

    def of(self, column: Tensor | None) -> Tensor:
        """Return the entries (a,) of each answer's last row, of a column (r,)."""
        assert column is not None
        return column if self._last is None else column[self._last]
