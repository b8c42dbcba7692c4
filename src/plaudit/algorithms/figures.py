"""Named figures of a step: converted to floats, and merged over micro-batches and ranks.

{name: number} -> plain -> Stats of each micro-batch and rank -> merge_stats -> Stats of the step
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from plaudit.algorithms.rows import Answers
from plaudit.batch import Batch
from plaudit.maths.advantages import equal_groups
from plaudit.maths.kl import k3
from plaudit.maths.ragged import row_sum
from plaudit.types import Stats


def merge_stats(parts: Iterable[Stats]) -> Stats:
    """Merge figures of micro-batches or ranks: add them, but take extremes of names that end in `max` or `min`."""
    merged: Stats = {}
    for name, value in (item for part in parts for item in part.items()):
        join = max if name.endswith("max") else min if name.endswith("min") else operator.add
        merged[name] = join(merged[name], value) if name in merged else value
    return merged


def whole_stats(parts: Iterable[Stats]) -> Stats:
    """Merge *all* parts of a step. Round `accuracy` to 6 digits: its float32 weights may sum to 1.00000003."""
    return {name: round(x, 6) if name == "accuracy" else x for name, x in merge_stats(parts).items()}


def plain(figures: Mapping[str, Any], whose: str) -> Stats:
    """Return the figures as floats. Raises TypeError that names a value which is not a number, and `whose`, the source
    of the figures, such as a hook."""
    if not isinstance(figures, Mapping):
        raise TypeError(f"{whose} must be a dict of named numbers, not {figures!r:.80}")
    return {name: _plain(value, name, whose) for name, value in figures.items()}


def mean_where(x: Tensor, mask: Tensor) -> float:
    """Return the mean of x over the mask; 0 for an empty mask."""
    return float(x[mask].mean()) if bool(mask.any()) else 0.0


def sampler_gap(current: Tensor, batch: Batch) -> Stats:
    """Return {"kl/old": k3 between sampler and learner, mean over trained tokens}; {} for rows that were not sampled.
    Before a batch's first update it shows how far engine and learner disagree."""
    if batch.behaviour is None:
        return {}
    assert batch.token_share is not None
    return {"kl/old": float((k3(batch.behaviour - current.detach()) * batch.token_share).sum())}


def credit_figures(batch: Batch, *, kl: Tensor | None = None, grouped: bool = True) -> Stats:
    """Return figures of advantages and trained lengths. With `kl`, an answer's sum of k1 (a,), also kl/reference. With
    `grouped`, also groups/equal: answers are compared within groups, so that equal rewards carry no signal."""
    assert batch.advantages is not None
    answers = Answers(batch)
    lengths = row_sum(batch.trainable.float(), answers.token, answers.count)
    trained = batch.advantages[batch.trainable]
    stats = {
        "advantage/mean": float(trained.mean()) if len(trained) else 0.0,
        "advantage/std": float(trained.std()) if len(trained) > 1 else 0.0,
        "length/trained": mean_where(lengths, lengths > 0),
    }
    if grouped:
        stats["groups/equal"] = equal_groups(answers.of(batch.reward), answers.of(batch.group))
    if kl is not None:
        stats["kl/reference"] = mean_where(kl, lengths > 0)
    return stats


def _plain(value: Any, name: str, whose: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text is not a number")
        return float(value.detach() if isinstance(value, Tensor) else value)  # float() with a gradient warns
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise TypeError(f"{whose}: {name!r} must be a number, not {value!r:.80}") from error
