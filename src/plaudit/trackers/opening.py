"""Experiment trackers that a run may also write to, opened by its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from plaudit.monitor.settings import LogSettings
from plaudit.monitor.sinks import Tracker


@contextmanager
def opened_trackers(
    settings: LogSettings, folder: Path, run: Mapping[str, Any], *, resumed_after: int
) -> Iterator[list[Tracker]]:
    """Open the trackers that the settings ask for; each raises ImportError with the install command.

    `run` has all settings of the run, which trackers show beside its figures. TensorBoard hides its points of steps
    after `resumed_after`. All trackers are closed, whatever closing one raises; if the run fails, its error is raised.
    """
    trackers: list[Tracker] = []
    failed = True
    try:
        if "tensorboard" in settings.trackers:
            from plaudit.trackers.tensorboard import TensorBoard

            trackers.append(TensorBoard(folder / settings.trackers["tensorboard"], resumed_after=resumed_after))
        if "wandb" in settings.trackers:
            from plaudit.trackers.wandb import WeightsAndBiases

            trackers.append(WeightsAndBiases(folder, project=settings.trackers["wandb"], settings=run))
        if "mlflow" in settings.trackers:
            from plaudit.trackers.mlflow import MLflow

            trackers.append(MLflow(folder, experiment=settings.trackers["mlflow"], settings=run))
        if "trackio" in settings.trackers:
            from plaudit.trackers.trackio import Trackio

            trackers.append(Trackio(folder, project=settings.trackers["trackio"], settings=run))
        yield trackers
        failed = False
    finally:
        with suppress(Exception) if failed else nullcontext(), ExitStack() as all_of_them:
            for tracker in reversed(trackers):
                all_of_them.callback(tracker.close, failed=failed)
