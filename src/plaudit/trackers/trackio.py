"""Sends a run's figures to Trackio. The only file that imports trackio, which is optional. Its database lies in
TRACKIO_DIR on this machine (`trackio show`); nothing is sent elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Trackio:
    """One Trackio run, under the name of `folder`. A run that is resumed in this folder continues the same record."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        import trackio

        self._markdown = trackio.Markdown
        self._run = trackio.init(
            project=project,
            name=folder.name,
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._markdown(text)}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()
