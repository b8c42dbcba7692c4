"""Experiment trackers that a run may also write to, opened by its settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from assent.monitor.settings import LogSettings


class Tracker(Protocol):
    """Takes the figures of each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(settings: LogSettings, folder: Path, *, resumed_after: int | None = None) -> list[Tracker]:
    """TensorBoard and Weights & Biases, where asked for; each raises ImportError with the install command."""
    trackers: list[Tracker] = []
    if settings.tensorboard:
        from assent.monitor.tensorboard import TensorBoard

        trackers.append(TensorBoard(folder / "tensorboard", resumed_after=resumed_after))
    if settings.wandb is not None:
        from assent.monitor.wandb import WeightsAndBiases

        trackers.append(WeightsAndBiases(folder, project=settings.wandb, name=folder.name, identity=folder.name))
    return trackers
