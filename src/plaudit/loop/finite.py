"""Checks for losses, gradients, weights and logits that are not finite.

Models, after a step -> check_weights -> published, or NonFiniteError: the run then resumes from a checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plaudit.loop.models import Models
from plaudit.loop.progress import Progress
from plaudit.support.errors import Ended

MAX_SKIPPED = 3
"""Most steps in a row with an update that is not finite: one may be chance, after three the run learns nothing."""


class NonFiniteError(Ended):
    """Losses or gradients were not finite in several steps in a row, or weights or logits of answers were not.
    Checkpoints of step `suspect` and later may hold the cause."""

    status = 6

    def __init__(self, message: str, *, suspect: int):
        super().__init__(message)
        self.suspect = suspect


def too_many_skipped(progress: Progress) -> NonFiniteError | None:
    if progress.skipped < MAX_SKIPPED:
        return None
    # The weights of the last step that was not skipped may be the cause: no step has learned from them.
    return NonFiniteError(
        f"a loss or gradient was not finite in {progress.skipped} steps in a row (up to step {progress.step}). No such "
        "update was made on any model. Lower the learning rate, or look at the data and rewards of these steps.",
        suspect=progress.step - progress.skipped,
    )


async def check_start(models: Models, whose: str) -> None:
    """Raise ValueError if a run would begin from weights that are not finite; `whose` names them."""
    if not await models.sound():
        raise ValueError(f"{whose} has weights that are not finite: start from another model")


async def check_weights(models: Models, step: int) -> None:
    """Raise NonFiniteError if the weights after `step` are not finite; call this before they are published."""
    if not await models.sound():
        raise NonFiniteError(
            f"weights are not finite after step {step}, so they were neither published nor saved. Lower the learning "
            "rate.",
            suspect=step,
        )


@contextmanager
def diverged(step: int) -> Iterator[None]:
    """While active, turn a FloatingPointError (an engine's logits are not finite) into NonFiniteError."""
    try:
        yield
    except FloatingPointError as error:
        raise NonFiniteError(
            f"after step {step} the policy's logits are not finite, so it cannot answer: its weights have "
            "diverged. Lower the learning rate.",
            suspect=step,
        ) from error
