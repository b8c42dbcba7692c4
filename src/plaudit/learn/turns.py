"""The order in which each pipeline stage makes its passes. Plain data, without torch.

    stages, spans, micro-batches -> turns -> for each stage, its Turns in order -> ticks -> for each tick, those of all

One forward, one backward (1F1B: Narayanan et al. 2019, https://arxiv.org/abs/1806.03377): a stage begins with as many
forward passes as it takes until its first backward pass can come, then alternates. With several spans of layers a stage
(interleaved: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473) a micro-batch passes all stages once a span; the
bubble is smaller, and more micro-batches are in flight. All stages make the passes of a kind in the same order, so that
tensors arrive in the order of use. Left out: zero-bubble schedules, since our kernels compute both gradients at once.
"""

from __future__ import annotations

from collections import deque
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


def source(turn: Turn, stage: int, stages: int, spans: int) -> tuple[int, Turn] | None:
    """Return the stage, and its pass, that gives this pass hidden states, or their gradient; None if it starts at the
    tokens or the loss."""
    if turn.backward:
        last = stage == stages - 1
        return None if last and turn.span == spans - 1 else ((stage + 1) % stages, turn._replace(span=turn.span + last))
    first = stage == 0
    return None if first and not turn.span else ((stage - 1) % stages, turn._replace(span=turn.span - first))


def target(turn: Turn, stage: int, stages: int, spans: int) -> tuple[int, Turn] | None:
    """Return the stage, and its pass, that takes this pass's output; None if it ends at the loss or the tokens."""
    found = source(turn._replace(backward=not turn.backward), stage, stages, spans)
    return found and (found[0], found[1]._replace(backward=turn.backward))


def ticks(stages: int, spans: int, parts: int, *, trains: bool = True) -> list[list[Turn | None]]:
    """Return what each stage does at each tick, if every pass takes one: a pass, or None where it waits. All ranks have
    the same table, so that a pair can exchange the outputs of a tick in one batch, and batches in one order."""
    left = [deque(one) for one in turns(stages, spans, parts, trains=trains)]
    done: set[tuple[int, Turn] | None] = {None}
    table: list[list[Turn | None]] = []
    while any(left):
        ready = [bool(one) and source(one[0], stage, stages, spans) in done for stage, one in enumerate(left)]
        table.append([one.popleft() if can else None for one, can in zip(left, ready, strict=True)])
        done |= {(stage, turn) for stage, turn in enumerate(table[-1]) if turn is not None}
    return table
