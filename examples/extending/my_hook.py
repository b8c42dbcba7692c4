"""A hook of your own: a run that keeps its best validation figure, and says when it got no better for a while."""

from __future__ import annotations

from plaudit import load_settings, run
from plaudit.loop.progress import Moment
from plaudit.types import Stats


class Best:
    """Returns the lowest validation loss so far and for how many evaluations it has stood."""

    def __init__(self) -> None:
        self.lowest = float("inf")
        self.stood = 0

    async def __call__(self, moment: Moment) -> Stats:
        loss = moment.stats.get("validation/loss")
        if loss is None:
            return {}
        self.stood = 0 if loss < self.lowest else self.stood + 1
        self.lowest = min(self.lowest, loss)
        return {"best/loss": self.lowest, "best/stood": float(self.stood)}


if __name__ == "__main__":
    done = run(load_settings("configs/sft.yaml", ["evaluate.every=50"]), hooks=[Best()])
    print([record["best/loss"] for record in done.metrics if "best/loss" in record])
