"""Evaluate a run's checkpoints in another process while it trains. Training does not wait.

RUN/checkpoints -> evaluate -> RUN/evaluations/CHECKPOINT, and a line in RUN/evaluations.jsonl, which the page draws
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from plaudit.evaluate.evaluation import EVALUATIONS, RESULT, evaluate
from plaudit.evaluate.settings import EvaluationSettings
from plaudit.evaluate.statistics import Interval
from plaudit.monitor.console import Reporter
from plaudit.monitor.folders import EVALUATED, summary
from plaudit.monitor.sinks import JsonLines
from plaudit.runs.records import CHECKPOINTS, Run
from plaudit.settings.tree import SettingsError
from plaudit.support.visible import rounded

PAUSE = 2.0
"""Seconds between two checks for a new checkpoint."""
ENDED = ("done", "stopped", "failed")


def follow(settings: EvaluationSettings, reporter: Reporter, *, pause: float = PAUSE) -> list[str]:
    """Evaluate all checkpoints of the run `settings.model`, and new ones until the run ends. Return their names.

    Checkpoints that were evaluated before are skipped, so an interrupted command can be repeated. Raises
    SettingsError if the model is not a run's folder.
    """
    settings.check()
    run = Run(str(settings.model))
    if not (run.folder / CHECKPOINTS).is_dir() and not (run.folder / "log.txt").is_file():
        raise SettingsError(f"model={settings.model}: --follow takes the folder of a run, such as runs/grpo")
    done: list[str] = []
    evaluated: set[str] = set()
    while True:
        ended = _ended(run)  # checked before the names: a run saves its last checkpoint before it ends
        for name in run.saved:
            if name not in evaluated and _evaluated(settings, run, name, reporter):
                done.append(name)
            evaluated.add(name)
        if ended:
            return done
        time.sleep(pause)


def _ended(run: Run) -> bool:
    """True if the run has ended. If its log is silent or unreadable it may have been killed: then try its lock."""
    state = summary("", run.folder)["state"]
    return state in ENDED or (state in ("silent", "unreadable") and not run.active)


def _evaluated(settings: EvaluationSettings, run: Run, name: str, reporter: Reporter) -> bool:
    """Evaluate one checkpoint and return True; False if it was evaluated before or has been removed."""
    out = Path(settings.output or run.folder / EVALUATIONS) / name
    model = run.checkpoint("policy", name)
    try:
        if (out / RESULT).exists() and (out / RESULT).stat().st_mtime > model.stat().st_mtime:
            return False
        found = evaluate(replace(settings, model=str(model), output=str(out)))
    except (OSError, ValueError):
        if model.is_dir():
            raise
        reporter.say(f"{name} was removed before it was evaluated: set save.keep=0 to keep all checkpoints")
        return False
    step = int(name.rpartition("globalstep")[2])
    means = {key: one.value if isinstance(one, Interval) else one for key, one in found.figures.items()}
    with JsonLines(run.folder / EVALUATED) as lines:
        lines.write({"step": step} | {f"evaluation/{key}": value for key, value in means.items()})
    reporter.say("  ".join([f"step {step}:", *(f"{key} {rounded(value, 'z.4f')}" for key, value in means.items())]))
    return True
