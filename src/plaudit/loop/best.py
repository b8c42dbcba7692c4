"""Keep track of a run's best evaluation, and of whether evaluations still get better."""

from __future__ import annotations

import math
from typing import Any

from plaudit.loop.progress import Moment, Progress
from plaudit.support.visible import rounded
from plaudit.types import Stats


class Best:
    """A hook that runs after the evaluation; every checkpoint saves its state.

    Losses (`loss` or `.../loss`) are best when lowest, all other figures when highest. A value that is not finite is
    never better. An evaluation whose rewards all failed has no value and does not count.
    """

    def __init__(self, figure: str | None, patience: int | None):
        """`figure`: one of the evaluation's figures, without `validation/`; None compares nothing. `patience`:
        evaluations in a row without a better one until `exhausted` is true; None waits forever."""
        self.figure, self.patience = figure, patience
        self.step: int | None = None
        self.checkpoint: str | None = None
        self.value = math.nan
        self.stood = 0
        """Evaluations since the best one."""

    async def __call__(self, moment: Moment) -> Stats:
        names = [name for name in moment.stats if name.startswith("validation/")]
        if self.figure is None or not names:
            return {}
        value = moment.stats.get(f"validation/{self.figure}")
        unrewarded = "validation/reward/failed" in moment.stats and "validation/reward/mean" not in moment.stats
        if value is None and (self.step is not None or unrewarded):
            return self._figures()
        if value is None:
            there = ", ".join(sorted(name.removeprefix("validation/") for name in names))
            raise ValueError(f"evaluate.best={self.figure}: an evaluation has no such figure; it has {there}")
        if self._better(value):
            self.value, self.stood = value, 0
            self.step, self.checkpoint = moment.progress.step, moment.progress.name
        else:
            self.stood += 1
        return self._figures()

    def _figures(self) -> Stats:
        return {} if self.step is None else {"best/step": float(self.step)}

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        assert self.figure is not None
        lower = self.figure.rpartition("/")[2] == "loss"
        return self.step is None or (value < self.value if lower else value > self.value)

    @property
    def exhausted(self) -> bool:
        """True once patience is used up: the run may end."""
        return self.patience is not None and self.stood >= self.patience

    def now(self, progress: Progress) -> bool:
        """True if this step's evaluation is the best so far."""
        return self.step == progress.step

    def summary(self, *, early: bool) -> list[str]:
        """Return lines to print at the end of a run. `early`: the run had further steps planned."""
        ended = [f"ended early: no better in {self.stood} evaluations"] if early and self.exhausted else []
        value = rounded(self.value, ".4f")
        return ended + [f"best: validation/{self.figure} {value} at step {self.step}"] * (self.step is not None)

    def state(self) -> dict[str, Any] | None:
        """The state as JSON; None if nothing is compared."""
        if self.figure is None:
            return None
        value = None if self.step is None else self.value
        state = {"figure": self.figure, "step": self.step, "checkpoint": self.checkpoint, "value": value}
        return state | {"stood": self.stood}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state, unless it belongs to another figure."""
        if state is not None and state["figure"] == self.figure:
            self.step, self.checkpoint, self.stood = state["step"], state["checkpoint"], state["stood"]
            self.value = math.nan if state["value"] is None else state["value"]
