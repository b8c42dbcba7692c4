"""Sends a run's figures to Weights & Biases. The only file that imports wandb, which is optional. wandb itself handles
keys, hosts and the offline mode (`wandb login`, WANDB_MODE=offline)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WeightsAndBiases:
    """One W&B run, with its local files and its id under `folder`, by whose name it is shown. A run that is resumed in
    this folder continues the W&B run; a run of the same name in another folder begins another."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=folder.name,
            id=_identity(folder / "wandb-id.txt"),
            resume="allow",
            config=dict(settings),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def _identity(file: Path) -> str:
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")
