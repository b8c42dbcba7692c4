"""Estimate micro-batches on the stages of a pipeline, in the order of `learn/turns.py`. Formulas only, no torch.

seconds of a micro-batch on a stage, of its head, of a message between stages -> seconds of all micro-batches
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

from plaudit.learn.turns import Turn, source, ticks, turns

FORWARD = 1 / 3
"""Share of a pass with gradients that its forward pass takes: backward, each product of matrices is two."""
MOST = 64
"""Most micro-batches that are played one by one; each further one takes as long as those before it."""


@cache
def seconds(stages: int, spans: int, parts: int, layers: float, head: float, hop: float, *, trains: bool) -> float:
    """Return the seconds until the last of `parts` micro-batches has passed all stages. `layers`: seconds of one on a
    stage's layers, with `trains` forwards and backwards; `head`: on the last stage besides; `hop`: of a message.

    Without head and hop the stages wait for (stages - 1) / (spans parts + stages - 1) of it, the bubble.
    """
    if parts > MOST:
        some, more = (seconds(stages, spans, n, layers, head, hop, trains=trains) for n in (MOST // 2, MOST))
        return more + (parts - MOST) * (more - some) / (MOST - MOST // 2)
    ends, free = dict[tuple[int, Turn], float](), [0.0] * stages
    for tick in ticks(stages, spans, parts, trains=trains):
        for stage, turn in enumerate(tick):
            if turn is None:
                continue
            before = source(turn, stage, stages, spans)
            start = free[stage] if before is None else max(free[stage], ends[before] + hop)
            share = (1 - FORWARD if turn.backward else FORWARD) if trains else 1.0
            last = stage == stages - 1 and turn.span == spans - 1
            free[stage] = ends[stage, turn] = start + share * (layers / spans + last * head)
    return max(free)


def under_way(stages: int, spans: int, parts: int, stage: int) -> int:
    """Return the most passes of a stage that wait for their backward pass at one time."""
    return max(accumulate(-1 if turn.backward else 1 for turn in turns(stages, spans, parts)[stage]))
