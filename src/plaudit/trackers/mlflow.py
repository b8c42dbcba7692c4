"""Sends a run's figures to MLflow. The only file that imports mlflow, which is optional. mlflow itself handles servers
(MLFLOW_TRACKING_URI); without one it writes to `mlflow.db` and `mlruns` in the present folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

MOST = 1000
"""Metrics of one request; servers refuse more."""


class MLflow:
    """One run of the experiment `project`. `folder` keeps its id, so that a run that is resumed there continues the
    same record."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric

        folder.mkdir(parents=True, exist_ok=True)
        self._metric, self._client = Metric, mlflow.MlflowClient()
        known = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if known is None else known.experiment_id
        identity = folder / "mlflow-id.txt"
        if not identity.exists():
            made = self._client.create_run(number, run_name=folder.name).info.run_id
            identity.write_text(made, encoding="utf-8")
        self._run = identity.read_text(encoding="utf-8")
        self._client.update_run(self._run, status="RUNNING")
        self._client.log_dict(self._run, dict(settings), "settings.yaml")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        made = (self._metric(name, value, now, step) for name, value in metrics.items())
        while some := list(islice(made, MOST)):
            self._client.log_batch(self._run, some)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}/{step:06}.txt")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
