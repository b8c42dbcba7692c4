"""One policy and its judge, measured by settings: figures with intervals as JSON and as a table, and the answers.

settings -> check -> models, data -> answers, scored -> figures of every kind asked for -> Evaluation
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.data.write import write_rows
from plaudit.evaluate.bench import Bench
from plaudit.evaluate.comparison import (
    Pairing,
    comparison_figures,
    decided,
    decision_figures,
    pairing_json,
    side_by_side,
)
from plaudit.evaluate.generation import Figures, generation_figures
from plaudit.evaluate.policy import Answer, Answers, Policy
from plaudit.evaluate.settings import WHOLE, EvaluationSettings
from plaudit.evaluate.statistics import Interval
from plaudit.models.folders import run_of
from plaudit.monitor.console import Reporter, of_figures
from plaudit.rewards.llm import Decision, LlmJudge
from plaudit.support.paths import at_home, write_whole
from plaudit.support.plugins import load_plugins
from plaudit.support.visible import rounded, visible

if TYPE_CHECKING:
    from rich.table import Table

RESULT, GENERATIONS, COMPARISON = "evaluation.json", "generations.jsonl", "comparison.jsonl"
EVALUATIONS = "evaluations"
"""Folder in a run's, with a folder for each of its evaluations."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation."""

    settings: EvaluationSettings
    figures: Figures
    """By name (perplexity, reward/gold, kl, win_rate/judge, ...): an estimate with its interval, or a plain number."""
    answers: Sequence[Answer]
    pairings: Sequence[Pairing]
    """Answers of model and other, paired, if they were compared."""
    decisions: Sequence[Decision]
    """A language model's decisions, one for each entry of `pairings`; empty if none was asked."""
    data: Mapping[str, Any]
    """The data report of every source that was read, by kind."""

    def json(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "figures": {name: figure_json(figure) for name, figure in self.figures.items()},
            "data": dict(self.data),
        }

    def table(self) -> Table:
        """Return the figures as a table for a terminal."""
        rows = ((name, *figure_cells(figure)) for name, figure in self.figures.items())
        title = f"Evaluation of {self.settings.model or self.settings.judge}"
        return of_figures(title, ("figure", "value", "95 % interval", "n"), rows)

    def save(self, folder: Path) -> None:
        """Write evaluation.json, and the answers as JSON lines if there are any; remove those of an earlier
        evaluation."""
        for name in (GENERATIONS, COMPARISON):
            (folder / name).unlink(missing_ok=True)
        save_result(folder, self.json())
        if self.answers:
            write_rows(folder / GENERATIONS, (answer.json() for answer in self.answers))
        if self.pairings:
            both = zip_longest(self.pairings, self.decisions)
            write_rows(folder / COMPARISON, (pairing_json(one, ("model", "other"), said) for one, said in both))


def evaluate(settings: EvaluationSettings, *, reporter: Reporter | None = None) -> Evaluation:
    """Measure what the settings name. Raises ValueError for contradictions before anything is loaded."""
    load_plugins(settings.plugins)
    settings.check()
    run = run_of(str(settings.model or settings.judge))
    no_place = settings.output is None and run is None
    folder = None if no_place else folder_of(settings.output, (run or Path()) / EVALUATIONS)
    if folder is not None:
        made_folder(folder)
    reporter = reporter or Reporter(quiet=True)
    bench = Bench(settings, reporter)
    kinds = settings.chosen()
    if not settings.kinds and not settings.lacking("kl") and "kl" not in kinds:
        reporter.say(f"the KL is left out: it {WHOLE}")
    policy = None if settings.model is None else bench.policy(settings.model)
    figures: Figures = {}
    answers: Answers = []
    pairings: list[Pairing] = []
    decisions: list[Decision] = []
    llm = LlmJudge(settings.llm) if settings.llm.url and "comparison" in kinds else None
    if policy is not None and "perplexity" in kinds:
        figures |= bench.perplexity(policy, name="model")
    if policy is not None and {"generation", "reward", "kl", "comparison"} & set(kinds):
        answers, pairings, found = _by_answers(bench, settings, policy, kinds)
        figures |= found
    if llm is not None:
        with reporter.track("decisions", len(pairings)) as tracker:
            decisions = decided(pairings, llm, tracker.advance)
        figures |= decision_figures(pairings, decisions, seed=settings.seed)
    if "preference" in kinds:
        figures |= _preference(bench, settings, policy)
    result = Evaluation(
        settings=settings,
        figures=figures,
        answers=[answer for group in answers for answer in group],
        pairings=pairings,
        decisions=decisions,
        data=bench.reports,
    )
    if folder is not None:
        result.save(folder)
        reporter.say(f"evaluation: {folder / RESULT}")
    return result


def _by_answers(
    bench: Bench, settings: EvaluationSettings, policy: Policy, kinds: Sequence[str]
) -> tuple[Answers, list[Pairing], Figures]:
    """Draw the policy's answers once. Return them, pairs with the other policy's answers, and their figures."""
    answers = bench.scored_answers(policy, settings.judge, name="model")
    figures: Figures = {}
    pairings: list[Pairing] = []
    if "generation" in kinds:
        figures |= generation_figures(answers)
    if "reward" in kinds or (answers[0][0].scores and "generation" in kinds):
        figures |= bench.reward_figures(answers)
    if "kl" in kinds:
        assert settings.reference is not None
        figures |= bench.kl(policy, bench.policy(settings.reference), answers)
    if "comparison" in kinds:
        assert settings.other is not None
        others = bench.scored_answers(bench.policy(settings.other), settings.judge, name="other", beside=answers)
        if answers[0][0].scores:
            figures |= comparison_figures(answers, others, seed=settings.seed)
        pairings = side_by_side(answers, others)
    return answers, pairings, figures


def _preference(bench: Bench, settings: EvaluationSettings, policy: Policy | None) -> Figures:
    """Accuracy on pairs by the judge, or without one by the policy's log-ratios to the reference."""
    if settings.judge is not None:
        found, whose = bench.judge_accuracy(bench.judge(settings.judge)), "judge"
    else:
        assert policy is not None and settings.reference is not None
        found, whose = bench.implied_accuracy(policy, bench.policy(settings.reference)), "policy"
    return {f"preference/{whose}/{name}": figure for name, figure in found.items()}


def folder_of(output: str | None, within: Path) -> Path:
    """Return the folder for results: `output`, else a path in `within` that does not exist, named by the time."""
    if output is not None:
        return at_home(output)
    name, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while (folder := within / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def made_folder(out: Path) -> None:
    """Make the folder of the figures before anything is loaded. Raises ValueError if it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write the figures to {out}: {error.strerror}. Give another output.") from error


def save_result(folder: Path, content: dict[str, Any]) -> None:
    """Write evaluation.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = visible(json.dumps(content, indent=1, ensure_ascii=False))
    write_whole(folder / RESULT, text + "\n")


def figure_json(figure: Interval | float) -> Any:
    """Convert for JSON: an interval to a mapping, a finite number to itself, any other number to None."""
    if isinstance(figure, Interval):
        return figure.json()
    return figure if abs(figure) < float("inf") else None


def figure_cells(figure: Interval | float) -> tuple[str, str, str]:
    """Value, interval and count for a table."""
    if not isinstance(figure, Interval):
        return number(figure), "", ""
    return number(figure.value), f"[{number(figure.low)}, {number(figure.high)}]", str(figure.count)


def scores_line(answer: Answer) -> str:
    """Format an answer's scores for people: "NAME VALUE, NAME VALUE", with - for a missing score."""
    scores = answer.scores.items()
    return ", ".join(f"{name} {'-' if score.value is None else number(score.value)}" for name, score in scores)


def number(value: float) -> str:
    """Format a number with three decimals below 1, two below 100, else one; from 1e12 on with an exponent. Never as
    -0."""
    text = rounded(value, ".3f" if abs(value) < 1 else ".2f" if abs(value) < 100 else ",.1f")
    return text.removeprefix("-") if not text.strip("-0.") else text
