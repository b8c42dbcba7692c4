"""Sends a run's figures to TensorBoard event files. The only file that imports TensorBoard, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Write event files into `folder`. A resumed run gives the step after which it continues: later points are
    hidden."""

    def __init__(self, folder: Path, *, resumed_after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_after + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, global_step=step)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()
