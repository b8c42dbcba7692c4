"""`plaudit compare`: show several runs side by side.

settings.yaml -> the settings that differ          metrics.jsonl -> figures of the last steps, one picture
answers of all policies to the same prompts, with the same seeds -> figures, win rates against the first run, examples
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.commands.options import NO_PICTURES
from plaudit.data.settings import DataSettings, absent, sources
from plaudit.data.write import write_rows
from plaudit.evaluate.bench import Bench
from plaudit.evaluate.comparison import comparison_figures, decided, decision_figures, side_by_side
from plaudit.evaluate.evaluation import figure_cells, figure_json, folder_of, made_folder, save_result, scores_line
from plaudit.evaluate.generation import Figures, generation_figures
from plaudit.evaluate.policy import Answers
from plaudit.evaluate.settings import CompareSettings
from plaudit.evaluate.statistics import mean_interval
from plaudit.monitor import plots
from plaudit.monitor.console import Reporter, of_texts
from plaudit.rewards.llm import LlmJudge
from plaudit.rewards.settings import RewardSettings
from plaudit.runs.origin import settings_of_run
from plaudit.runs.records import SETTINGS, Run
from plaudit.settings.recipes import load_tree, parse_override, read_saved
from plaudit.support.bounded import UnreadableError
from plaudit.support.fields import flat, leaves, shown
from plaudit.support.paths import at_home
from plaudit.support.plugins import load_plugins
from plaudit.support.visible import visible

if TYPE_CHECKING:
    from rich.table import Table

LAST = 10
"""Number of last steps over which figures are averaged."""
PICTURE, ANSWERS, COMPARISONS = "comparison.png", "comparison.jsonl", "comparisons"
OF_A_FOLDER = ("name", "output", "resume", "overwrite", "log")
"""Settings that say nothing about what was trained."""
SCORING = ("judge", "gold", "rewards", "llm")
READING = ("train", "validation", "limit", "shuffle", "stream")
"""Settings of `data` that say which rows are read. The others say how they are read, and are taken from a run."""
SAMPLING = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens", "stop", "special_tokens")
OF_RUNS = ("weight", "workers", "resources", "offload")
"""Settings of a reward or an environment that are for training runs only and are dropped here."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of a comparison. Every mapping has one entry per run, by its name."""

    settings: CompareSettings
    runs: Mapping[str, Run]
    different: Mapping[str, tuple[Any, ...]]
    """Settings that differ, with their values in the order of the runs."""
    recorded: Mapping[str, Figures]
    """Means over the last steps, and the last validation figures."""
    asked: str
    """Text that says which prompts were answered, and how; "" if none were."""
    measured: Mapping[str, Figures]
    """Figures of the answers; empty if none were drawn."""
    answers: Mapping[str, Answers]
    folder: Path

    def json(self) -> dict[str, Any]:
        def plain(figures: Mapping[str, Figures]) -> dict[str, Any]:
            return {run: {name: figure_json(one) for name, one in own.items()} for run, own in figures.items()}

        return {
            "settings": dataclasses.asdict(self.settings),
            "runs": {name: str(run.folder) for name, run in self.runs.items()},
            "different": {key: dict(zip(self.runs, values, strict=True)) for key, values in self.different.items()},
            "recorded": plain(self.recorded),
            "asked": self.asked,
            "measured": plain(self.measured),
        }

    def tables(self) -> list[Table]:
        """Return tables of settings, figures and answers for a terminal."""
        rows = {key: [shown(value) for value in values] for key, values in self.different.items()}
        found = [of_texts("Settings that differ", ("setting", *self.runs), rows)]
        for title, figures in (("Recorded", self.recorded), (f"Measured on {self.asked}", self.measured)):
            names = dict.fromkeys(name for own in figures.values() for name in own)
            if names:
                cells = {name: [_cell(figures[run].get(name)) for run in self.runs if run in figures] for name in names}
                found.append(of_texts(title, ("figure", *figures), cells))
        return [*found, *([self.examples()] if self.answers and self.settings.examples else [])]

    def examples(self) -> Table:
        """The runs' answers to a few prompts, evenly spread over all prompts."""
        groups = list(zip(*self.answers.values(), strict=True))
        count = min(self.settings.examples, len(groups))
        chosen = [groups[k * len(groups) // count] for k in range(count)]
        rows = {
            f"{number}. {own[0][0].prompt.text}": [
                f"{group[0].completion.text.strip()}\n{scores_line(group[0])}".rstrip("\n") for group in own
            ]
            for number, own in enumerate(chosen, 1)
        }
        return of_texts("Answers side by side", ("prompt", *self.answers), rows, lines=True)


def compare(folders: Sequence[str], overrides: Sequence[str] = (), *, reporter: Reporter | None = None) -> Compared:
    """Compare runs and save the result in `output`, or else in `comparisons` beside the first run. Raises
    ValueError before anything is loaded if a folder is not a run."""
    reporter = reporter or Reporter(quiet=True)
    runs = named([Run(Path(folder)) for folder in folders])
    try:
        settings = settings_of(runs, overrides)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the {SETTINGS} of {' or '.join(runs)} lacks what a run saves: {error!r:.100}") from error
    load_plugins(settings.plugins)
    settings.check()
    folder = folder_of(settings.output, next(iter(runs.values())).folder.parent / COMPARISONS)
    made_folder(folder)
    measured, answers = dict[str, Figures](), dict[str, Answers]()
    if why := _unanswered(runs, settings):
        reporter.say(f"answers are not compared: {why}")
    else:
        measured, answers = _measured(runs, settings, reporter)
    result = Compared(
        settings=settings,
        runs=runs,
        different=differing(runs),
        recorded={name: recorded(run.metrics) for name, run in runs.items()},
        asked=asked(runs, settings, len(next(iter(answers.values())))) if answers else "",
        measured=measured,
        answers=answers,
        folder=folder,
    )
    save_result(folder, result.json())
    methods = {name: str(read_saved(run.folder / SETTINGS).get("method")) for name, run in runs.items()}
    curves = [plots.PlottedRun(name, methods[name], run.metrics) for name, run in runs.items()]
    if NO_PICTURES:
        reporter.say(NO_PICTURES)
    else:
        plots.draw_together(curves, folder / PICTURE)
    if answers:
        write_rows(folder / ANSWERS, _lines(answers))
    return result


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return {name: run}; a name is the shortest end of the run's path that no other run has."""
    if len({run.folder.resolve() for run in runs}) < max(2, len(runs)):
        raise ValueError("give two or more runs, each once: plaudit compare runs/A runs/B")
    for run in runs:
        files = [run.folder / name for name in (SETTINGS, plots.METRICS)]
        if not all(file.is_file() and file.stat().st_size for file in files):
            raise UnreadableError(
                f"{run.folder} is not a run with a finished step: it has no {SETTINGS} or {plots.METRICS}"
            )
    parts = [run.folder.resolve().parts for run in runs]
    length = next(n for n in range(1, 1 + max(map(len, parts))) if len({part[-n:] for part in parts}) == len(parts))
    return {visible("/".join(part[-length:]), line=True): run for part, run in zip(parts, runs, strict=True)}


def settings_of(runs: Mapping[str, Run], overrides: Sequence[str]) -> CompareSettings:
    """Read settings from the runs (the first online run has priority for prompts and sampling), then from overrides."""
    recipes = [settings_of_run(run.folder) for run in runs.values()]
    online = next((recipe for recipe in recipes if recipe["rewards"]), recipes[0])
    fed = DataSettings(train=online["data"]["train"], validation=online["data"]["validation"])
    split = online["data"]["validation_split" if fed.apart else "split"]
    tree: dict[str, Any] = {
        "prompts": list(fed.apart or fed.fed),
        "data": {key: value for key, value in recipes[0]["data"].items() if key not in READING} | {"split": split},
        "sampling": {key: online["rollout"][key] for key in SAMPLING},
        "environment": {key: v for key, v in online.get("environment", {}).items() if key not in OF_RUNS},
        "plugins": list(dict.fromkeys(plugin for recipe in recipes for plugin in recipe["plugins"])),
        "limit": 64,
    }
    if not {parse_override(text).key.split(".")[0] for text in overrides} & set(SCORING):
        rewards = [{key: v for key, v in one.items() if key not in OF_RUNS} for one in online["rewards"]]
        judges = [one for one in rewards if one["kind"] == "judge" and not one["name"]]
        if len(judges) == 1:
            tree["judge"] = judges[0]["path"]
            rewards.remove(judges[0])
        tree["rewards"] = rewards
    return load_tree(CompareSettings, tree, overrides)


def differing(runs: Mapping[str, Run]) -> dict[str, tuple[Any, ...]]:
    """Return settings that differ, by key, with the value of each run; None if its file lacks the key."""
    found = [flat(read_saved(run.folder / SETTINGS)) for run in runs.values()]
    keys = (key for key in dict.fromkeys(key for one in found for key in one) if key.split(".")[0] not in OF_A_FOLDER)
    values = {key: tuple(one.get(key) for one in found) for key in keys}
    return {key: own for key, own in values.items() if any(value != own[0] for value in own) and not _idle(key, own)}


def _idle(key: str, values: tuple[Any, ...]) -> bool:
    """True if a difference has no effect: some runs lack the key, the others have its default or an empty value."""
    usual = {f"rewards.{leaf.key}": leaf.value for leaf in leaves(RewardSettings)}.get(re.sub(r"\.\d+", "", key), {})
    return None in values and all(value in (None, {}, [], usual) for value in values)


def recorded(metrics: Sequence[Mapping[str, Any]]) -> Figures:
    """Means over the last steps with intervals, and the last validation figures."""
    if not metrics:
        raise ValueError(f"a run has no finished step in its {plots.METRICS}")
    shown = [figure.name for some in plots.PLOTS.values() for figure in some]
    figures: Figures = {"steps": float(metrics[-1]["step"])}
    for name in shown:
        if values := [float(record[name]) for record in metrics[-LAST:] if record.get(name) is not None]:
            figures[name] = mean_interval(values)
    for record in metrics:
        figures |= {name: v for name, v in record.items() if name.startswith("validation/") and v is not None}
    return figures


def _unanswered(runs: Mapping[str, Run], settings: CompareSettings) -> str:
    """Return why answers cannot be sampled; "" if they can."""
    if lacking := [name for name, run in runs.items() if not (run.folder / "checkpoints" / "policy").is_dir()]:
        return f"{', '.join(lacking)} has no policy"
    return f"there is no {gone[0]}: set prompts" if (gone := absent(settings.prompts)) else ""


def asked(runs: Mapping[str, Run], settings: CompareSettings, count: int) -> str:
    """The number and sources of the prompts, by whom each source was trained on, and the temperature."""

    def place(source: str, data: DataSettings) -> tuple[Path, str]:
        path = at_home(source).resolve()
        return path, "" if path.is_file() else data.split_of(source)

    own = {name: settings_of_run(run.folder)["data"] for name, run in runs.items()}
    fed = {name: DataSettings(train=data["train"], split=data["split"]) for name, data in own.items()}
    origins = []
    for source in sources(settings.prompts):
        by = [name for name, data in fed.items() if place(source, settings.data) in [place(s, data) for s in data.fed]]
        who = "not trained on" if not by else "trained on" + f" by {', '.join(by)}" * (len(by) < len(fed))
        origins.append(f"{source.removeprefix(f'{Path.cwd()}/')} ({who})")
    return f"{count:,} prompts of {', '.join(origins)}, temperature {settings.sampling.temperature:g}"


def _measured(
    runs: Mapping[str, Run], settings: CompareSettings, reporter: Reporter
) -> tuple[dict[str, Figures], dict[str, Answers]]:
    """Return the figures and answers of every run's policy on the same prompts."""
    bench = Bench(settings, reporter)
    llm = LlmJudge(settings.llm) if settings.llm.url else None
    measured, answers = dict[str, Figures](), dict[str, Answers]()
    first: Answers | None = None
    for name, run in runs.items():
        policy = bench.policy(str(run.checkpoint("policy")))
        own = bench.scored_answers(policy, settings.judge, name=name, beside=first)
        figures = generation_figures(own) | bench.reward_figures(own)
        if settings.reference is not None:
            figures |= bench.kl(policy, bench.policy(settings.reference), own)
        if first is not None:
            found = comparison_figures(own, first, seed=settings.seed)
            figures |= {name: figure for name, figure in found.items() if not name.startswith("reward/")}
            if llm is not None:
                pairs = side_by_side(own, first)
                figures |= decision_figures(pairs, decided(pairs, llm), seed=settings.seed)
        first = first or own
        measured[name], answers[name] = figures, own
    return measured, answers


def _lines(answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """One line per prompt and sample, with the answers of all runs."""
    return [
        {"prompt": row[0].prompt.text, **{name: one.json() for name, one in zip(answers, row, strict=True)}}
        for own in zip(*answers.values(), strict=True)
        for row in zip(*own, strict=True)
    ]


def _cell(figure: Any) -> str:
    if figure is None:
        return ""
    value, between, _ = figure_cells(figure)
    return f"{value} {between}".rstrip()
