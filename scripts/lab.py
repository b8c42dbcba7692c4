"""Train variants of the recipes of `configs/` on a task, and measure each against its SFT policy, once.

    seed -> data, SFT, judge (once a seed) -> a variant's run -> its checkpoints -> gold, KL, win rate ... -> JSON

A variant that was measured is not run again, unless its recipe or its overrides changed. Its checkpoints are removed
once they are measured. Every figure is of answers to the same 256 held-out prompts, as in `plaudit demo`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import chdir
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from plaudit.tasks.demo import make_demo

if TYPE_CHECKING:
    from plaudit.evaluate.bench import Bench

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (3, 4, 5)
"""Of data, weights, order and samples. Recipes were tuned on prompts of seeds 0 to 2, so none of those report them."""
EXAMPLES = 4
QUIET = ("threads=1", "log.quiet=true", "log.page=false", "log.samples_megabytes=0", "overwrite=true")
FIGURES = ("step", "kl", "gold", "judge", "win", "length", "unfinished")
"""Columns of a measured point; KL in nats an answer, win rate over the SFT policy by gold, length in tokens."""
WITH_WORDS = (*FIGURES, "perplexity", "distinct")
"""Also the answers' perplexity by the SFT policy, and the share of different word pairs."""
Point = list[float]
Stage = tuple[str, str, tuple[str, ...]]
"""A recipe, the name of its run, overrides."""
FIRST: tuple[Stage, ...] = (("sft", "sft", ()), ("reward", "reward", ()))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What variants are trained on, and what measures them."""

    folder: str = "data/demo"
    make: Callable[..., Any] = make_demo
    """Writes a seed's files into a folder, given as `folder, seed=seed`; its `about.json` comes last."""
    label: Callable[[Path, int], None] | None = None
    """Writes files that need the SFT policy, before the judge is trained."""
    first: tuple[Stage, ...] = FIRST
    gold: str = "plaudit.tasks.demo:gold_reward"
    options: Mapping[str, Any] = field(default_factory=dict)
    prompts: str = "data/demo/prompts_test.jsonl"
    """Held-out ones; 256 of them are used."""
    max_tokens: int = 48
    figures: tuple[str, ...] = FIGURES
    """Columns of a point: FIGURES, or WITH_WORDS."""
    shared: bool = False
    """All seeds have the files and the SFT policy of the first, which take long; labels and judges are their own."""


DEMO = Task()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run, measured every `every` steps (None: at its end)."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    every: int | None = None
    needs: tuple[Stage, ...] = ()
    """Runs that it starts from, beside the SFT policy and the judge of the recipes."""
    judge: str = "reward"
    """The run of the judge that it is trained on."""
    task: Task = DEMO
    behind: bool = False
    """True if sampling runs ahead, so that samples are as old as rollout.max_lag lets them be. In one process they are
    not, since nothing is sampled while it learns."""

    @property
    def about(self) -> dict[str, Any]:
        """What its record is of."""
        recipe = yaml.safe_load((ROOT / "configs" / f"{self.recipe}.yaml").read_text(encoding="utf-8"))
        about = {"recipe": recipe, "overrides": list(self.overrides)}
        return about | {"behind": True} if self.behind else about

    def measured(self, lab: Path, seed: int) -> list[Point]:
        """Return the points of its checkpoints: those of an earlier call if there are any, else of a new run."""
        if points := self.kept(lab, seed):
            return points
        prepare(lab, seed, self.needs, self.task)
        with chdir(lab / f"seed{seed}"):
            points, texts = self._run(seed)
        path = self._path(lab, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"about": self.about, "points": points, "texts": texts}
        path.with_suffix(".part").write_text(json.dumps(record) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return points

    def kept(self, lab: Path, seed: int) -> list[Point]:
        """Return its points if they were measured with this recipe and these overrides, else none."""
        path = self._path(lab, seed)
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return list(record["points"]) if record.get("about") == self.about else []

    def _path(self, lab: Path, seed: int) -> Path:
        return lab / "measured" / f"{self.name}_{seed}.json"

    def _run(self, seed: int) -> tuple[list[Point], list[str]]:
        """Return its points and its last answers to the first prompts."""
        from plaudit.runs.records import Run

        judge = () if self.judge == "reward" else (f"rewards.0.path=runs/{self.judge}",)
        saves = (f"save.every={self.every or 10**6}", "save.keep=0")
        train(self.recipe, self.name, seed, *self.overrides, *judge, *saves, hooks=(run_ahead,) * self.behind)
        run = Run(Path("runs") / self.name)
        meter = Meter(self.judge, self.task)
        points = [[0, 0.0, *meter.before]]
        for name in run.saved:
            step = int(name.rpartition("globalstep")[2])
            points.append([step, *meter.figures(str(run.checkpoint("policy", name)))])
        shutil.rmtree(run.folder / "checkpoints")
        return points, meter.texts


def train(recipe: str, name: str, seed: int, *overrides: str, hooks: Sequence[Any] = ()) -> None:
    """Run a recipe. Its paths are relative to the folder of its seed, which is the working one."""
    from plaudit import load_settings, run

    said = [*QUIET, *overrides, f"name={name}", f"seed={seed}"]
    run(load_settings(str(ROOT / "configs" / f"{recipe}.yaml"), said), hooks=hooks)


async def run_ahead(moment: Any) -> None:
    """A hook that waits until all prompts that have begun are answered."""
    while any(getattr(task.get_coro(), "__name__", "") == "rollout" for task in asyncio.all_tasks()):
        await asyncio.sleep(0.001)


def prepare(lab: Path, seed: int, stages: Sequence[Stage] = (), task: Task = DEMO) -> None:
    """Make a seed's data, SFT policy and judge, and further stages, unless they are there."""
    folder, first = lab / f"seed{seed}", lab / f"seed{SEEDS[0]}"
    sft = folder / "runs" / "sft"
    if task.shared and folder != first and not sft.exists():
        prepare(lab, SEEDS[0], stages, task)
        shutil.copytree(first / task.folder, folder / task.folder, dirs_exist_ok=True)
        sft.parent.mkdir(exist_ok=True)
        sft.unlink(missing_ok=True)
        sft.symlink_to(Path("../..", first.name, "runs", "sft"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "scripts").exists():  # recipes name rewards as "scripts/FILE.py:NAME", from the working folder
        (folder / "scripts").unlink(missing_ok=True)  # to a tree that is gone
        (folder / "scripts").symlink_to(ROOT / "scripts")
    with chdir(folder):
        if not (Path(task.folder) / "about.json").exists():
            task.make(Path(task.folder), seed=seed)
        for number, (recipe, name, overrides) in enumerate((*task.first, *stages)):
            done = Path("runs") / name / "done"
            if not done.exists():
                if number == 1 and task.label:
                    task.label(Path(task.folder), seed)
                train(recipe, name, seed, *overrides)
                done.touch()


def bench(task: Task, samples: int = 1, **how: Any) -> Bench:
    """What answers the task's held-out prompts, or others, and asks gold."""
    from plaudit.evaluate.bench import Bench
    from plaudit.evaluate.settings import BeforeAfterSettings, SamplingSettings
    from plaudit.monitor.console import Reporter

    sampling = SamplingSettings(max_tokens=task.max_tokens, samples=samples)
    given: dict[str, Any] = {"gold": task.gold, "gold_options": dict(task.options), "prompts": task.prompts} | how
    return Bench(BeforeAfterSettings(sampling=sampling, **given), Reporter(quiet=True))


class Meter:
    """Figures of answers to the held-out prompts, beside the SFT policy's."""

    def __init__(self, judge: str, task: Task = DEMO):
        from plaudit.runs.records import Run

        self._task, self._bench = task, bench(task)
        self._sft = self._bench.policy(str(Run("runs/sft").model))
        self._judge = str(Run(f"runs/{judge}").model)
        self.texts: list[str] = []
        """The last answers to the first prompts."""
        self._theirs, self.before = self._answered(self._sft)

    def figures(self, path: str) -> list[float]:
        """Return a checkpoint's figures, in the order of the task's after the step."""
        policy = self._bench.policy(path)
        answers, figures = self._answered(policy)
        return [round(self._bench.kl(policy, self._sft, answers)["kl"].value, 4), *figures]

    def _answered(self, policy: Any) -> tuple[Any, list[float]]:
        from plaudit.evaluate.comparison import comparison_figures
        from plaudit.evaluate.generation import generation_figures
        from plaudit.evaluate.perplexity import perplexity

        answers = self._bench.scored_answers(policy, self._judge, name="answers")
        found: dict[str, Any] = generation_figures(answers) | self._bench.reward_figures(answers)
        theirs = answers if policy is self._sft else self._theirs
        found |= comparison_figures(answers, theirs, seed=0)
        self.texts = [group[0].completion.text for group in answers[:EXAMPLES]]
        names = ("reward/gold", "reward/judge", "win_rate/gold", "length", "unfinished")
        own = [round(found[name].value, 4) for name in names]
        if self._task.figures != FIGURES:
            rows = [row for group in answers for answer in group for row in answer.rows()]
            own += [round(perplexity(self._sft, rows)["perplexity"].value, 4), round(found["distinct_2"], 4)]
        return answers, own


def kept(variants: Sequence[Variant], lab: Path, seeds: Sequence[int]) -> dict[str, dict[str, list[Point]]]:
    """Return each variant's points by seed, as far as they were measured."""
    found = {v.name: {str(seed): points for seed in seeds if (points := v.kept(lab, seed))} for v in variants}
    return {name: points for name, points in found.items() if points}


def measure(variants: Sequence[Variant], lab: Path, seeds: Sequence[int], *, jobs: int) -> None:
    """Measure all variants of one task that were not yet, `jobs` at a time. Says which ones failed."""
    lab = lab.resolve()
    for seed in seeds:
        needs = dict.fromkeys(stage for variant in variants for stage in variant.needs)
        prepare(lab, seed, list(needs), variants[0].task)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        asked = {pool.submit(v.measured, lab, seed): f"seed {seed}, {v.name}" for seed in seeds for v in variants}
        for future in as_completed(asked):
            if error := future.exception():
                print(f"{asked[future]}: {error!r}", flush=True)
            else:
                figures = dict(zip(FIGURES, future.result()[-1], strict=False))
                print(f"{asked[future]}: gold {figures['gold']:.3f}, KL {figures['kl']:.1f}", flush=True)
