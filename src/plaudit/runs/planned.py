"""Read the planned seconds of a run's steps, from the file that `plaudit plan` writes beside the run's folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from plaudit.monitor.sinks import replace_file
from plaudit.settings.tree import Settings, to_plain

FREE = ("name", "output", "seed", "resume", "overwrite", "plugins", "optimizer", "train", "save", "evaluate", "log")
"""Settings on which the seconds of a step do not depend."""


def key_of(settings: Settings) -> str:
    """Return a hash of the settings on which a step's seconds depend: all except those in FREE."""
    hashed = {name: value for name, value in to_plain(settings).items() if name not in FREE}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()[:16]


def beside(s: Settings, what: str) -> Path:
    """Return the path of a recipe's profile or plan: OUTPUT/NAME.WHAT.json, with the method if it has no name."""
    return Path(s.output) / f"{s.name or s.method}.{what}.json"


def keep(settings: Settings, what: str, text: str) -> Path:
    """Write `text` to the recipe's profile or plan (`beside`), and return its path."""
    path = beside(settings, what)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
    return path


def planned(settings: Settings, folder: Path) -> dict[str, float]:
    """Return planned seconds of `step`, `generate`, `rewards`, `learn` for these settings; {} without such a plan."""
    try:
        plans = json.loads(folder.with_name(f"{folder.name}.plan.json").read_text(encoding="utf-8"))["plans"]
        mine = next(plan for plan in plans.values() if plan["key"] == key_of(settings))
        calls: dict[str, float] = mine["calls"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return {}
    learn = {name: seconds for name, seconds in calls.items() if name.endswith((" scores", " trains"))}
    rest = {name: seconds for name, seconds in calls.items() if name not in (*learn, "generate", "publish")}
    sums = {"learn": sum(learn.values()), "rewards": sum(rest.values()), "generate": calls.get("generate", 0.0)}
    return {"step": float(mine["step"])} | sums
