"""Make some steps of a recipe in processes of their own: seconds of a step, and memory of all its processes.

settings -> `plaudit train` in a folder that is thrown away -> its metrics, /proc -> Trial
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plaudit.monitor.sinks import read_jsonl
from plaudit.runs.records import METRICS
from plaudit.runtime.memory import peaks
from plaudit.settings.tree import Settings, SettingsError, resolved


class Trial(NamedTuple):
    """What the steps took."""

    step: float
    """Median seconds of a step, without the first."""
    memory: float | None
    """Bytes: the sum of what the processes took at most; None if they are not this machine's, or it has no /proc."""


def trial(settings: Settings, steps: int = 3) -> Trial:
    """Make `steps` + 1 steps. Raises SettingsError with what the run said if it fails."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        train = replace(settings.train, steps=steps + 1)
        path = Path(folder, "check.yaml")
        path.write_text(resolved(replace(settings, output=folder, name="check", resume=None, train=train)), "utf-8")
        command = [sys.executable, "-m", "plaudit", "train", str(path), "log.quiet=true", "evaluate.every=null"]
        most: dict[int, float] = {}
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            while process.poll() is None:
                for number, size in peaks(process.pid).items():
                    most[number] = max(size, most.get(number, 0.0))
                time.sleep(0.25)
        if process.returncode:
            log.seek(0)
            raise SettingsError(f"the run failed: {log.read().strip()[-500:]}")
        records = read_jsonl(Path(folder, "check", METRICS))
    step = float(statistics.median(record["time/step"] for record in records[1:]))
    return Trial(step, sum(most.values()) if most and settings.runtime.address is None else None)
