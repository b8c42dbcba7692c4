"""How long until the answers are good: the demo's task by Plaudit and by TRL's trainers, the same method, from nothing.

    tokenizer, data -> SFT -> reward model -> GRPO or RLOO -> gold of the sampled answers passes the mark
    tokenizer, data -> SFT -> DPO -> time, and gold of answers to held-out prompts

Both train the same model (race.yaml, of Llama's shape) on the same data with the same settings of SFT, of the reward
model and of the method. Gold, which neither learns from, is that of the answers sampled in training, over the last 256
of them, by the same function. Time is from the start of the process; ours makes the data within it, TRL is given them.
One side runs after the other. `make race` runs every method with three seeds, `make race MODEL=FOLDER` the task of a
pretrained model (race_pretrained.py).
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from contest import watched
from harness import PLAUDIT, ROOT, SOURCE, about, asked, keep
from harness import table as markdown
from measure import Setting
from report import END, RESULTS, put

OVER = 256
"""Answers over which gold is averaged."""
STAGES = {"sft": "SFT done", "reward": "reward model done", "gold": "gold reached", "trained": "DPO done"}
RECIPE = ROOT / "src" / "plaudit" / "commands" / "demo.yaml"
BOTH: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("race.yaml").read_text(encoding="utf-8"))
METHODS: tuple[str, ...] = tuple(BOTH["ours"])


@dataclass
class Course:
    """What one side has shown so far."""

    ends: dict[str, float] = field(default_factory=dict)
    """Seconds from the start until each of STAGES."""
    gold: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and gold of the answers of each step."""
    rate: float = 0.0
    """Tokens a second, and in `peak_mib` memory at most; 0 where they are not measured."""
    peak_mib: float = 0.0
    failure: str = ""

    def saw(self, seconds: float, gold: float, *, answers: int, mark: float) -> bool:
        """Whether the mark was passed by this step."""
        self.gold.append((seconds, gold))
        steps = OVER // answers
        recent = [value for _, value in self.gold[-steps:]]
        if len(recent) == steps and statistics.fmean(recent) >= mark:
            self.ends["gold"] = seconds
        return "gold" in self.ends

    @property
    def last(self) -> float:
        """Gold of the last answers."""
        return self.gold[-1][1] if self.gold else math.nan


def main() -> None:
    options = asked(
        __doc__,
        threads=(len(os.sched_getaffinity(0)), "of each side"),
        mark=(0.6, "gold to reach"),
        limit=(1800.0, "seconds after which a side has lost"),
        methods=[*METHODS],
        seeds=(3, "how many, from 0 on"),
        model=(Path(), "folder of a pretrained model, which both sides train to answer the questions of its demo"),
        prompts=(16, "questions a step of that"),
        profile=(False, "where a step of ours takes its time there, in place of a race"),
        publish=(False, "write into docs/benchmarks.md what was found there"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no side behind
    folder = ROOT / "runs" / f"race-{time.strftime('%Y%m%d-%H%M%S')}"
    kind: type[Race] = Race
    if options.model.name:
        from race_pretrained import Pretrained, explain

        kind, options.methods = Pretrained, ["pretrained"]
        if options.profile:
            explain(folder, options)
            return
    for method in options.methods:
        found: list[dict[str, Course]] = []
        for seed in range(options.seeds):
            place = folder / f"{method}{seed}"
            place.mkdir(parents=True)
            print(f"{method}, seed {seed}: running", flush=True)
            race = kind(method, seed, place, options)
            found.append({"ours": race.ours(), "trl": race.theirs()})
            told = [{side: vars(course) for side, course in courses.items()} for courses in found]
            keep(folder / f"{method}.json", told)
        text = f"{method}: seconds from the start, {options.threads} threads, gold {options.mark}"
        print(f"{text}\n\n{table(found)}")
        if options.publish:
            keep(RESULTS / f"{time.strftime('%Y-%m-%d')}-{method}.json", told)
            put(f"<!-- {method}: written by benchmarks/race.py -->", f"{table(found)}\n\n{about()}; {text}\n", END)
        for seed, courses in enumerate(found):
            for side, course in courses.items():
                if course.failure:
                    print(f"seed {seed}, {side}: {course.failure}")
    print(f"every step: {folder}")


def table(found: Sequence[dict[str, Course]]) -> str:
    """A row a seed and side, and how many times as fast ours was."""
    ends = {stage for courses in found for course in courses.values() for stage in course.ends}
    stages = [stage for stage in STAGES if stage in ends]
    rated = any(course.rate for courses in found for course in courses.values())
    rows, ratios = list[list[str]](), list[float]()
    for seed, courses in enumerate(found):
        for side, course in courses.items():
            cells = [f"{course.ends[stage]:.0f}" if stage in course.ends else "-" for stage in stages]
            ours, theirs = (one.ends.get(stages[-1]) if stages else None for one in courses.values())
            if compared := side == "trl" and bool(ours and theirs):
                ratios.append(theirs / ours)
            cells += [f"{course.last:.2f}" if course.gold else "-"]
            cells += [f"{course.rate:,.0f}", f"{course.peak_mib:,.0f}"] if rated else []
            rows.append([str(seed), side, *cells, f"{ratios[-1]:.2f}" if compared else ""])
    titles = ("seed", "side", *(STAGES[stage] for stage in stages), "last gold", *(["tok/s", "MiB"] if rated else []))
    if len(ratios) > 1:
        rows.append(["mean", *("" for _ in titles[1:]), f"{statistics.fmean(ratios):.2f}"])
    return markdown((*titles, "times as fast"), rows)


@dataclass(frozen=True)
class Race:
    """One method with one seed, in a folder of its own."""

    method: str
    seed: int
    folder: Path
    options: Any

    @property
    def stages(self) -> tuple[str, ...]:
        """Before the method."""
        return ("sft",) if self.method == "dpo" else ("sft", "reward")

    @property
    def data(self) -> Path:
        return self.folder / "ours" / f"seed{self.seed}" / "data"

    def ours(self) -> Course:
        """A pipeline as the demo's, watched through the files that every run leaves."""
        output, recipe = self.folder / "ours", self.folder / "recipe.yaml"
        recipe.write_text(pipeline(self.method), encoding="utf-8")
        code = (
            "from pathlib import Path; from plaudit.commands.demo import demo_data, run_task; "
            f"run_task(Path({str(recipe)!r}), demo_data, Path({str(output)!r}), seeds=[{self.seed}], "
            f"overrides=['shared.threads={self.options.threads}'])"
        )
        runs = output / f"seed{self.seed}"
        steps = Tail(runs / self.method / "metrics.jsonl")
        answers = answers_a_step(self.method)

        def look(course: Course, seconds: float) -> bool:
            for stage, behind in zip(self.stages, (*self.stages[1:], self.method), strict=True):
                if stage not in course.ends and (runs / behind / "settings.yaml").exists():
                    course.ends[stage] = seconds
            if self.method == "dpo":
                return self._trained(course, seconds, runs / "dpo")
            mark = self.options.mark
            return any(course.saw(seconds, step["reward/gold"], answers=answers, mark=mark) for step in steps.new())

        return self._run([sys.executable, "-c", code], "ours", look, runs / "dpo")

    def _trained(self, course: Course, seconds: float, run: Path) -> bool:
        log = run / "log.txt"
        if log.exists() and " done: " in log.read_text(encoding="utf-8"):
            course.ends["trained"] = seconds
        return "trained" in course.ends

    def theirs(self) -> Course:
        """TRL's trainers, watched through the lines that `race_trl.py` writes."""
        python = ROOT / ".venv-trl" / "bin" / "python"
        if not python.exists():
            return Course(failure=".venv-trl is not there: `make bench-peers` makes it")
        lines, output = Tail(self.folder / "trl.jsonl"), self.folder / "trl"
        script = str(Path(__file__).with_name("race_trl.py"))
        arguments = [self.method, *map(str, (self.data, output, lines.path, self.options.threads, self.seed))]

        def look(course: Course, seconds: float) -> bool:
            for line in lines.new():
                if "stage" in line:
                    course.ends[line["stage"]] = seconds
                elif course.saw(seconds, line["gold"], answers=line["answers"], mark=self.options.mark):
                    return True
            return "trained" in course.ends

        return self._run([str(python), script, *arguments], "trl", look, output / "dpo")

    def _run(self, command: list[str], side: str, look: Callable[[Course, float], bool], policy: Path) -> Course:
        """A side until it passes the mark, ends, or has lost. A DPO policy's gold is that of answers to held-out
        prompts, which are drawn after its time."""
        setting = Setting(self.folder, self.folder, self.options.threads, 0, False, "kept", "default", True)
        course, log = Course(), self.folder / f"{side}.log"
        course.failure = watched(
            command, setting.environment() | SOURCE, log, partial(look, course), self.options.limit
        )
        if "trained" in course.ends:
            prompts, folder = self.data / "prompts_test.jsonl", policy.parent / "gold"
            found = held_out(policy, prompts, folder, gold="plaudit.tasks.demo:gold_reward", tokens=48)
            course.gold.append((course.ends["trained"], found))
        return course


def pipeline(method: str) -> str:
    """The demo's pipeline as YAML, with the race's model, up to the method and without an evaluation."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    before = {"sft": recipe["stages"]["sft"]} | ({} if method == "dpo" else {"reward": recipe["stages"]["reward"]})
    before["sft"]["model"] = {"config": BOTH["model"]}
    ours = {"shared": recipe["shared"], "stages": before | {method: BOTH["ours"][method]}}
    return str(yaml.safe_dump(ours, sort_keys=False))  # the order of stages is that of the file


def answers_a_step(method: str) -> int:
    """Of ours."""
    from plaudit.settings.recipes import defaults

    own = BOTH["ours"][method]
    samples = own.get("algorithm", {}).get("samples", getattr(defaults(method).algorithm, "samples", 1))
    return int(own.get("rollout", {}).get("prompts_per_step", 0) * samples)


def held_out(policy: Path, prompts: Path, output: Path, *, gold: str, tokens: int) -> float:
    """Gold of sampled answers to the test prompts."""
    words = (f"model={policy}", f"gold={gold}", f"prompts={prompts}", f"output={output}")
    limit = f"sampling.max_tokens={tokens}"
    subprocess.run([*PLAUDIT, "evaluate", *words, limit], check=True, capture_output=True)
    found = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    return float(found["figures"]["reward/gold"]["value"])


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


if __name__ == "__main__":
    main()
