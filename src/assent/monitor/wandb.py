"""Sends a run's figures to Weights & Biases. The only file that imports wandb, which is optional.

Keys, hosts and the offline mode are wandb's own business (`wandb login`, WANDB_MODE=offline): nothing is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WeightsAndBiases:
    """One W&B run, its local files under `folder`. The same `identity` continues the run that has it."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        identity: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "The W&B sink needs the package wandb, which is not installed. "
                "Install it with: pip install 'assent[wandb]'"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=name,
            id=identity,
            resume="allow" if identity else None,
            config=dict(settings or {}),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
