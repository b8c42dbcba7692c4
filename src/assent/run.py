"""A run and its folder: what a finished or stopped run left behind, for scripts and notebooks.

    run folder: settings.yaml, data.json, metrics.jsonl, samples.jsonl, log.txt, checkpoints/<role>/<name>/
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from assent.monitor.sinks import read_jsonl

SETTINGS, DATA, METRICS, SAMPLES, LOG, CHECKPOINTS = (
    "settings.yaml",
    "data.json",
    "metrics.jsonl",
    "samples.jsonl",
    "log.txt",
    "checkpoints",
)


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    folder: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, oldest first."""
        return read_jsonl(self.folder / METRICS)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Recorded answers: prompt, completion, rewards by part, advantage, versions. Empty for offline methods."""
        path = self.folder / SAMPLES
        return read_jsonl(path) if path.exists() else []

    def checkpoint(self, role: str = "policy", name: str | None = None) -> Path:
        """Folder of a role's model (policy, critic, judge), the newest whole one unless named."""
        from assent.loop.checkpoint import Store

        return Store(self.folder / CHECKPOINTS).model(role, name)

    @property
    def model(self) -> Path:
        """Folder of the model that this run trained: its policy, or its judge."""
        role = "policy" if (self.folder / CHECKPOINTS / "policy").exists() else "judge"
        return self.checkpoint(role)
