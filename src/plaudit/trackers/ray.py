"""Offers a run's figures to Prometheus, by the agents of Ray's nodes. The run uses a cluster with `ray[default]`, which
lists its agents in a file for Prometheus (docs/distributed.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RayMetrics:
    """A gauge for each figure, `ray_PROJECT_reward_mean` for reward/mean, with the run's name as its label `run`. Only
    the newest value is kept. Texts and settings are left out."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        if settings["runtime"]["kind"] != "ray":
            raise ValueError("log.trackers.ray offers figures by Ray's agents: set runtime=ray, or another")
        from ray.util.metrics import Gauge

        self._gauge, self._project, self._run = Gauge, project, folder.name
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": step}.items():
            key = re.sub(r"\W", "_", f"{self._project}_{name}", flags=re.ASCII)
            if key not in self._gauges:
                self._gauges[key] = self._gauge(key, description=name, tag_keys=("run",))
            self._gauges[key].set(float(value), tags={"run": self._run})

    def text(self, step: int, name: str, text: str) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        pass
