"""How a run ends, and which of its checkpoints is best, as rooms below the loop know it too."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import ClassVar

from plaudit.support.bounded import content, record


class Ended(RuntimeError):
    """A run ended before its last step, for a reason that the user can act on. Its notes say what is saved."""

    status: ClassVar[int] = 1
    """Exit status of the command."""

    def __str__(self) -> str:
        return " ".join((super().__str__(), *vars(self).get("__notes__", ())))


class Stopped(Exception):
    """A signal stopped the run, which saved first. `code` is the exit status."""

    def __init__(self, signum: int, step: int | None):
        """`step` is None if its workers were not ready and there is nothing new to save."""
        when = "before its workers were ready" if step is None else f"after step {step}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {when}; resume=latest continues from there")
        self.code = 128 + signum


def best_checkpoint(state: Path) -> str | None:
    """Name of the checkpoint with the best evaluation, as known to this `state` folder; None if evaluations were not
    compared (`evaluate.best`)."""
    values = state / "values.json"
    best = record(content(values)).get("best") if values.exists() else None
    return None if best is None else best["checkpoint"]
