"""How long a user waits: for `--help`, and from the command to the first training step of a tiny model.

The commands of both sides run one after the other, in turn; a record as those of `measure.py` comes out, in seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contest import Contender, ContenderError, watched
from harness import PLAUDIT, ROOT, SOURCE
from lines import ASIDE, TRL, Line, Row
from measure import DEADLINE, Setting, entry, task_of

TRIES = {"start-help": 5, "start-step": 3}
"""Measured tries, after one that warms the file cache."""
Timed = Callable[[], float]


def measure_start(name: str, setting: Setting) -> dict[str, Any]:
    """A record of one of the `ASIDE` lines."""
    folder = setting.folder / name
    folder.mkdir()
    ours, theirs = helps(setting) if name == "start-help" else first_steps(setting, folder)
    peer_is_there = setting.peers and (ROOT / ".venv-trl" / "bin" / "python").exists()
    sides: dict[str, Timed] = {"ours": ours} | ({TRL: theirs} if peer_is_there else {})
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    missing: dict[str, str] = {}
    for attempt in range(2 if setting.hurry else TRIES[name] + 1):
        for side, timed in sides.items():
            if side in missing:
                continue
            try:
                taken = timed()
            except (ContenderError, subprocess.SubprocessError, OSError) as error:
                missing[side] = str(error)
                continue
            if attempt:
                seconds[side].append(taken)
    told = {side: {"missing": missing[side]} if side in missing else figures(seconds[side]) for side in sides}
    if not peer_is_there:
        told[TRL] = {"missing": ".venv-trl is not there: `make bench-peers` makes it"}
    about = {"line": name, "title": ASIDE[name], "model": "tiny" if name == "start-step" else "", "precision": "fp32"}
    return {**about, "unit": "s", "threads": setting.threads, "ours": told["ours"], "peers": {TRL: told[TRL]}}


def figures(seconds: Sequence[float]) -> dict[str, Any]:
    return {"value": statistics.median(seconds), "rates": list(seconds), "name": "TRL 1.16.0"}


def helps(setting: Setting) -> tuple[Timed, Timed]:
    def whole(command: Sequence[str], source: dict[str, str]) -> float:
        """Seconds that a command takes in all."""
        environment = {**os.environ, **setting.environment(), **source}
        began = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=DEADLINE)
        return time.perf_counter() - began

    trl = str(ROOT / ".venv-trl" / "bin" / "trl")
    return partial(whole, [*PLAUDIT, "--help"], SOURCE), partial(whole, [trl, "--help"], {"PYTHONPATH": ""})


def first_steps(setting: Setting, folder: Path) -> tuple[Timed, Timed]:
    """The command until its metrics hold a step, and TRL's trainer until its callback hears of one."""
    line = Line(name="start", title="", method="sft", steps={"tiny": 1})
    task = task_of(Row(line, "tiny", "fp32"), setting, folder)
    recipe = {
        "name": "run",
        "output": task.output,
        "overwrite": True,
        "threads": task.threads,
        "model": {"path": str(task.path("fresh"))},
        "data": {"train": task.data, "shuffle": False},
        "train": {"steps": task.total_steps, "batch_size": task.rows},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    metrics = Path(task.output) / "run" / "metrics.jsonl"
    command = [*PLAUDIT, "sft", str(folder / "recipe.yaml")]
    start = entry(TRL, task, setting, folder)

    def ours() -> float:
        taken = 0.0

        def look(seconds: float) -> bool:
            nonlocal taken
            taken = seconds
            return metrics.exists() and metrics.stat().st_size > 0

        metrics.unlink(missing_ok=True)
        failure = watched(command, setting.environment() | SOURCE, folder / "plaudit.log", look, DEADLINE)
        if failure:
            raise ContenderError(failure)
        return taken

    def theirs() -> float:
        if isinstance(start, str):
            raise ContenderError(start)
        contender: Contender = start()
        try:
            contender.warm_up()
        finally:
            contender.stop()
        return contender.result.first_step

    return ours, theirs
