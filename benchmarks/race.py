"""How long until the answers are good: the demo's task by Plaudit's demo and by TRL's trainers, from nothing.

    tokenizer, data -> SFT -> reward model -> PPO (ours) or GRPO (TRL's, tuned) -> gold of the answers passes the mark

Both train the same model on the same data with the same SFT and reward settings. Gold, which neither learns from, is
that of the answers sampled in training, over the last 256 of them, by the same function. Time is from the start of the
process; ours makes the data within it, TRL is given them. One side runs after the other. `make race` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import ROOT, Setting
from rich.console import Console
from rich.table import Table

OVER = 256
"""Answers over which gold is averaged."""
STAGES = ("sft", "reward", "gold")
POLL = 0.2


@dataclass
class Course:
    """What one side has shown so far."""

    ends: dict[str, float] = field(default_factory=dict)
    """Seconds from the start until SFT ended, the reward model was there, and gold passed the mark."""
    gold: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and gold of the answers of each step."""
    failure: str = ""

    def saw(self, seconds: float, gold: float, *, answers: int, mark: float) -> bool:
        """Whether the mark was passed by this step."""
        self.gold.append((seconds, gold))
        steps = OVER // answers
        recent = [value for _, value in self.gold[-steps:]]
        if len(recent) == steps and statistics.fmean(recent) >= mark:
            self.ends["gold"] = seconds
        return "gold" in self.ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--mark", type=float, default=0.6, help="gold to reach")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a side has lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", default="ours,trl")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no side behind
    folder = ROOT / "runs" / f"race-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    setting = Setting(folder, folder, options.threads, 0, False, "kept", "default", True)
    courses: dict[str, Course] = {}
    sides: dict[str, Callable[[Path, Setting, argparse.Namespace], Course]] = {"ours": ours, "trl": theirs}
    for side in options.sides.split(","):
        print(f"{side}: running", flush=True)
        courses[side] = sides[side](folder, setting, options)
        told = {name: {"ends": one.ends, "gold": one.gold, "failure": one.failure} for name, one in courses.items()}
        (folder / "race.json").write_text(json.dumps(told, indent=1) + "\n")
    Console(highlight=False).print(table(courses, options.mark, options.threads))
    for side, course in courses.items():
        if course.failure:
            print(f"{side}: {course.failure}")
    print(f"every step: {folder / 'race.json'}")


def table(courses: dict[str, Course], mark: float, threads: int) -> Table:
    found = Table(title=f"seconds from the start, {threads} threads", title_justify="left")
    for title in ("", "SFT done", "reward model done", f"gold {mark} reached", "last gold"):
        found.add_column(title, justify="right" if title else "left")
    for side, course in courses.items():
        cells = [f"{course.ends[stage]:.0f}" if stage in course.ends else "-" for stage in STAGES]
        found.add_row(side, *cells, f"{course.gold[-1][1]:.2f}" if course.gold else "-")
    times = [course.ends.get("gold") for course in courses.values()]
    if len(times) == 2 and times[0] and times[1]:
        found.add_row("times as fast", "", "", f"{times[1] / times[0]:.2f}", "")
    return found


def ours(folder: Path, setting: Setting, options: argparse.Namespace) -> Course:
    """The demo's command, watched through the files that every run leaves."""
    output = folder / "ours"
    code = (
        "from pathlib import Path; from plaudit.commands.demo import run_demo; "
        f"run_demo(Path({str(output)!r}), seeds=[{options.seed}], overrides=['shared.threads={options.threads}'])"
    )
    environment = {**os.environ, **setting.environment(), "PYTHONPATH": str(ROOT / "src")}
    runs = output / f"seed{options.seed}"
    steps = Tail(runs / "ppo" / "metrics.jsonl")

    def look(course: Course, seconds: float) -> bool:
        for stage, behind in (("sft", "reward"), ("reward", "ppo")):
            if stage not in course.ends and (runs / behind / "settings.yaml").exists():
                course.ends[stage] = seconds
        return any(course.saw(seconds, step["reward/gold"], answers=64, mark=options.mark) for step in steps.new())

    return watched([sys.executable, "-c", code], environment, folder / "ours.log", look, options.limit)


def theirs(folder: Path, setting: Setting, options: argparse.Namespace) -> Course:
    """TRL's trainers, watched through the lines that `race_trl.py` writes."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    data = folder / "ours" / f"seed{options.seed}" / "data"
    if not python.exists():
        return Course(failure=".venv-trl is not there: `make bench-peers` makes it")
    if not data.exists():
        make = (
            "from pathlib import Path; from plaudit.tasks.demo import make_demo; "
            f"make_demo(Path({str(data)!r}), seed={options.seed})"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run([sys.executable, "-c", make], env=environment, check=True)
    lines = Tail(folder / "trl.jsonl")
    script = str(Path(__file__).with_name("race_trl.py"))
    arguments = [str(data), str(folder / "trl"), str(lines.path), str(options.threads), str(options.seed)]
    environment = {**os.environ, **setting.environment(), "PYTHONPATH": str(ROOT / "src")}  # the gold function alone

    def look(course: Course, seconds: float) -> bool:
        for line in lines.new():
            if "stage" in line:
                course.ends[line["stage"]] = seconds
            elif course.saw(seconds, line["gold"], answers=line["answers"], mark=options.mark):
                return True
        return False

    return watched([str(python), script, *arguments], environment, folder / "trl.log", look, options.limit)


class Tail:
    """The lines that were added to a JSON Lines file since one last looked."""

    def __init__(self, path: Path):
        self.path, self.place = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self.place)
            while (line := file.readline()).endswith("\n"):
                self.place = file.tell()
                yield json.loads(line)


def watched(
    command: list[str], environment: dict[str, str], log: Path, look: Callable[[Course, float], bool], limit: float
) -> Course:
    """Run a side until it passes the mark, ends, or has lost."""
    course, began = Course(), time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        while time.perf_counter() - began < limit:
            over = process.poll() is not None
            if look(course, time.perf_counter() - began):
                return course
            if over:
                course.failure = f"it ended (status {process.returncode}) before the mark; its output is in {log}"
                return course
            time.sleep(POLL)
        course.failure = f"it did not pass the mark in {limit:.0f} s"
        return course
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
