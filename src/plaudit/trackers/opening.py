"""Experiment trackers that a run may also write to, opened by its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from plaudit.monitor.settings import LogSettings
from plaudit.monitor.sinks import Tracker

CLASSES = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow", "trackio": "Trackio"}
CLASSES |= {"ray": "RayMetrics"}
"""Trackers by package, each in the file of this name."""


@contextmanager
def opened_trackers(
    settings: LogSettings, folder: Path, run: Mapping[str, Any], *, resumed_after: int
) -> Iterator[list[Tracker]]:
    """Open the trackers that the settings ask for. Raises ImportError with the install command for a missing package.

    `run` has all settings of the run, which trackers show beside its figures. TensorBoard hides its points of steps
    after `resumed_after`. All trackers are closed, whatever closing one raises; if the run fails, its error is raised.
    """
    trackers: list[Tracker] = []
    failed = True
    try:
        for name in (name for name in CLASSES if name in settings.trackers):
            trackers.append(_opened(name, settings.trackers[name], folder, run, resumed_after))
        yield trackers
        failed = False
    finally:
        with suppress(Exception) if failed else nullcontext(), ExitStack() as all_of_them:
            for tracker in reversed(trackers):
                all_of_them.callback(tracker.close, failed=failed)


def _opened(name: str, project: str, folder: Path, run: Mapping[str, Any], resumed_after: int) -> Tracker:
    kind = vars(import_module(f"plaudit.trackers.{name}"))[CLASSES[name]]
    try:
        if name == "tensorboard":
            return kind(folder / project, resumed_after=resumed_after)  # type: ignore[no-any-return]
        return kind(folder, project=project, settings=run)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise ImportError(
            f"log.trackers.{name} needs the package {name}, which is not installed ({error}). In Plaudit's folder: "
            f"pip install -e '.[{name}]'"
        ) from error
