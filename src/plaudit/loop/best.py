"""Which evaluation of a run was its best, and whether it has stopped getting better."""

from __future__ import annotations

import math
from typing import Any

from plaudit.loop.progress import Moment, Progress
from plaudit.types import Stats


class Best:
    """A hook behind the evaluation; what it knows is saved with every checkpoint.

    Of figures called a loss, `loss` or `.../loss`, the lowest is the best, of all others the highest. A value that is
    not a finite number is never better. An evaluation whose rewards failed has none, and counts for nothing.
    """

    def __init__(self, figure: str | None, patience: int | None):
        """`figure`: of the evaluation, without `validation/`; None compares nothing. `patience`: evaluations in a row
        without a better one after which `exhausted` is true; None waits for ever."""
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
        if value is None and (self.step is not None or moment.stats.get("validation/reward/failed") == 1.0):
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
        """The run need not go on."""
        return self.patience is not None and self.stood >= self.patience

    def now(self, progress: Progress) -> bool:
        """Whether no step before this one was as good."""
        return self.step == progress.step

    def told(self, *, early: bool) -> list[str]:
        """Lines for people, at the end of a run. `early`: it would have had further steps."""
        ended = [f"ended early: no better in {self.stood} evaluations"] if early and self.exhausted else []
        best = [] if self.step is None else [f"best: validation/{self.figure} {self.value:.4f} at step {self.step}"]
        return ended + best

    def state(self) -> dict[str, Any] | None:
        """As JSON; None where nothing is compared."""
        if self.figure is None:
            return None
        value = None if self.step is None else self.value
        kept = {"figure": self.figure, "step": self.step, "checkpoint": self.checkpoint, "value": value}
        return kept | {"stood": self.stood}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from there, unless that was another figure."""
        if state is not None and state["figure"] == self.figure:
            self.step, self.checkpoint, self.stood = state["step"], state["checkpoint"], state["stood"]
            self.value = math.nan if state["value"] is None else state["value"]
