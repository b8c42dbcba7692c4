"""Experiment trackers that a run may also write to, opened by its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from assent.monitor.settings import LogSettings


class Tracker(Protocol):
    """Takes the figures of each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """`failed`: the run may go on later, under the same name."""
        ...


@contextmanager
def opened_trackers(settings: LogSettings, folder: Path, *, resumed_after: int) -> Iterator[list[Tracker]]:
    """TensorBoard and Weights & Biases, where asked for; each raises ImportError with the install command. What they
    have of steps after `resumed_after` is of a sitting that this one replaces."""
    trackers = _opened(settings, folder, resumed_after)
    failed = True
    try:
        yield trackers
        failed = False
    finally:
        for tracker in trackers:
            tracker.close(failed=failed)


def _opened(settings: LogSettings, folder: Path, resumed_after: int) -> list[Tracker]:
    trackers: list[Tracker] = []
    if settings.tensorboard:
        from assent.monitor.tensorboard import TensorBoard

        trackers.append(TensorBoard(folder / "tensorboard", resumed_after=resumed_after))
    if settings.wandb is not None:
        from assent.monitor.wandb import WeightsAndBiases

        trackers.append(WeightsAndBiases(folder, project=settings.wandb, name=folder.name, identity=folder.name))
    return trackers
