"""The order in which each pipeline stage makes its passes. Plain data, without torch.

    stages, spans, micro-batches -> turns -> for each stage, its Turns in order

One forward, one backward (1F1B: Narayanan et al. 2019, https://arxiv.org/abs/1806.03377): a stage begins with as many
forward passes as it takes until its first backward pass can come, then alternates. With several spans of layers a stage
(interleaved: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473) a micro-batch passes all stages once a span; the
bubble is smaller, and more micro-batches are in flight. All stages make the passes of a kind in the same order, so that
tensors arrive in the order of use. Left out: zero-bubble schedules, since our kernels compute both gradients at once.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple


class Turn(NamedTuple):
    """One forward or backward pass of a stage over one micro-batch."""

    backward: bool
    span: int
    """Index of the span among the stage's spans of layers."""
    part: int
    """Index of the micro-batch."""


def turns(stages: int, spans: int, parts: int, *, trains: bool = True) -> list[list[Turn]]:
    """Return each stage's passes, in order. Each micro-batch has one forward pass per span and, with `trains`, also one
    backward pass per span."""
    rounds = max(1, parts // stages)
    groups = [range(parts * one // rounds, parts * (one + 1) // rounds) for one in range(rounds)]
    if spans == 1:
        groups = [range(parts)]
    forwards = [Turn(False, span, part) for group in groups for span in range(spans) for part in group]
    if not trains:
        return [forwards] * stages
    backwards = [Turn(True, span, part) for group in groups for span in reversed(range(spans)) for part in group]
    return [_alternating(forwards, backwards, _ahead(stages - 1 - stage, spans, groups)) for stage in range(stages)]


def _ahead(behind: int, spans: int, groups: list[range]) -> int:
    """Return the number of forward passes that a stage makes before it alternates; `behind` stages come after it."""
    return behind if spans == 1 else 2 * behind + (spans - 1) * max(map(len, groups))


def _alternating(forwards: list[Turn], backwards: list[Turn], ahead: int) -> list[Turn]:
    pairs = zip_longest(forwards[ahead:], backwards)
    return forwards[:ahead] + [turn for pair in pairs for turn in pair if turn is not None]


def source(turn: Turn, stage: int, stages: int, spans: int) -> int | None:
    """Return the stage that sends this pass hidden states, or their gradient; None if it starts at tokens or loss."""
    if turn.backward:
        last = turn.span == spans - 1 and stage == stages - 1
        return None if last else (stage + 1) % stages
    return None if turn.span == stage == 0 else (stage - 1) % stages


def target(turn: Turn, stage: int, stages: int, spans: int) -> int | None:
    """Return the stage that receives this pass's output; None if the pass ends at the loss or at the tokens."""
    return source(turn._replace(backward=not turn.backward), stage, stages, spans)
