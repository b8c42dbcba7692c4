"""A run and its folder: what a finished or stopped run left behind, for scripts and notebooks.

run folder: settings.yaml, data.json, metrics.jsonl, samples.jsonl, log.txt, checkpoints/<role>/<name>/
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from assent.loop.checkpoint import Store, make_folder
from assent.monitor.sinks import read_jsonl
from assent.settings import Settings, SettingsError

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
        return Store(self.folder / CHECKPOINTS).model(role, name)

    @property
    def model(self) -> Path:
        """Folder of the model that this run trained: its policy, or its judge."""
        role = "policy" if (self.folder / CHECKPOINTS / "policy").exists() else "judge"
        return self.checkpoint(role)


def open_folder(settings: Settings) -> Path:
    """The run's folder, made or, for a resume, found. Refuses to mix two runs."""
    name = settings.name or f"{settings.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name.startswith("."):
        raise SettingsError(f"name={name!r} must be a plain folder name; its place is set by `output`")
    folder = Path(settings.output) / name
    if settings.resume:
        if settings.name is None:
            raise SettingsError(f"resume={settings.resume} needs the run's name: set name=...")
        if settings.overwrite:
            raise SettingsError("resume and overwrite contradict each other: keep one")
    elif folder.exists() and any(folder.iterdir()):
        if not settings.overwrite:
            raise SettingsError(f"{folder} holds a run already: set resume=latest, overwrite=true or another name")
        shutil.rmtree(folder)
    try:
        make_folder(folder)
    except OSError as error:
        raise SettingsError(f"the run's folder {folder} cannot be made: {error}") from error
    return folder


def find_resume(settings: Settings, store: Store) -> tuple[str | None, list[str]]:
    """The checkpoint to go on from, if any, and what is wrong with newer ones."""
    if settings.resume is None or (settings.resume == "latest" and not store.names()):
        return None, []
    if settings.resume == "latest":
        return store.latest()
    if settings.resume not in store.names():
        raise SettingsError(f"resume={settings.resume}: there is latest, or one of {store.names()}")
    store.verify(settings.resume)
    return settings.resume, []
