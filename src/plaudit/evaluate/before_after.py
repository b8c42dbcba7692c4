"""Compare a policy before and after training, in one table: which measures improved, and how far it moved (KL).

Gold is shown beside the judge: a policy that only exploits the judge rises in one and not in the other. Both policies
answer the same prompts with the same seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.data.write import write_rows
from plaudit.evaluate.bench import Bench
from plaudit.evaluate.comparison import Pairing, comparison_figures, pairing_json, side_by_side
from plaudit.evaluate.evaluation import COMPARISON, figure_cells, figure_json, made_folder, save_result, scores_line
from plaudit.evaluate.generation import Figures, generation_figures
from plaudit.evaluate.policy import Answers, Policy
from plaudit.evaluate.settings import BeforeAfterSettings
from plaudit.evaluate.statistics import Interval
from plaudit.monitor.console import Reporter, of_figures, of_texts
from plaudit.types import Prompt

if TYPE_CHECKING:
    from rich.table import Table

NO_BREAK = "\u00a0"
ROWS = {
    "gold reward": "reward/gold",
    "judge's reward": "reward/judge",
    "KL to before (nats)": "kl",
    "perplexity": "perplexity",
    "unfinished answers": "unfinished",
    "length, tokens": "length",
    "distinct word pairs": "distinct_2",
}
"""Rows of the table, each with the figure it shows."""


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Figures of both policies, of after against before, and of the judge."""

    settings: BeforeAfterSettings
    before: Figures
    after: Figures
    change: dict[str, Interval]
    """Win rate and difference of rewards of "after" against "before", by gold and judge, paired by prompt."""
    judge: dict[str, Interval]
    """The judge's accuracy and margin on held-out pairs."""
    pairings: Sequence[Pairing]
    """Every prompt with both answers and their scores; `first` is before, `second` after."""

    @property
    def completions(self) -> Sequence[Pairing]:
        """A few answers, spread over the prompts."""
        count = min(self.settings.examples, len(self.pairings))
        return [self.pairings[k * len(self.pairings) // count] for k in range(count)]

    def json(self) -> dict[str, Any]:
        parts: dict[str, Figures] = {
            "before": self.before,
            "after": self.after,
            "change": {**self.change},
            "judge": {**self.judge},
        }
        return {
            "settings": dataclasses.asdict(self.settings),
            **{part: {name: figure_json(figure) for name, figure in found.items()} for part, found in parts.items()},
        }

    def table(self) -> Table:
        """Return a table: each figure before, after and its change, with 95 % intervals."""
        rows: list[tuple[str, ...]] = []
        for label, name in ROWS.items():
            if name in self.after:
                short = name.removeprefix("reward/")
                change = _cell(self.change.get(f"difference/{short}"), signed=True)
                wins = _cell(self.change.get(f"win_rate/{short}"))
                rows.append((label, _cell(self.before.get(name)), _cell(self.after[name]), change, wins))
        if "accuracy" in self.judge:
            rows.append(("judge's accuracy", _cell(self.judge["accuracy"]), "", "", ""))
        return of_figures("Before and after", ("", "before", "after", "change", "after wins"), rows)

    def examples(self) -> Table:
        """A few completions side by side, with their scores."""
        rows = {
            f"{number}. {_question(pairing.prompt)}": [
                f"{answer.completion.text.strip()}\n{scores_line(answer)}" for answer in (pairing.first, pairing.second)
            ]
            for number, pairing in enumerate(self.completions, 1)
        }
        return of_texts("Completions side by side", ("prompt", "before", "after"), rows, lines=True)

    def save(self, folder: Path) -> None:
        """Write evaluation.json and comparison.jsonl."""
        save_result(folder, self.json())
        write_rows(folder / COMPARISON, (pairing_json(pairing, ("before", "after")) for pairing in self.pairings))


def before_after(
    before: str | Policy,
    after: str | Policy,
    *,
    settings: BeforeAfterSettings,
    judge: str | None = None,
    out: Path | None = None,
    reporter: Reporter | None = None,
) -> BeforeAfter:
    """Measure both policies (folders of checkpoints, or loaded ones); with `out`, save the result there."""
    settings.check()
    if out is not None:
        made_folder(out)
    bench = Bench(settings, reporter or Reporter(quiet=True))
    old, new = (bench.policy(policy) if isinstance(policy, str) else policy for policy in (before, after))
    old_figures, old_answers = _measured(bench, old, judge, "before")
    new_figures, new_answers = _measured(bench, new, judge, "after")
    new_figures |= bench.kl(new, old, new_answers)
    change = comparison_figures(new_answers, old_answers, seed=settings.seed)
    asked = judge is not None and settings.is_set("preferences")
    result = BeforeAfter(
        settings=settings,
        before=old_figures,
        after=new_figures,
        change={name: figure for name, figure in change.items() if name.startswith(("win_rate", "difference"))},
        judge=bench.judge_accuracy(bench.judge(judge)) if judge is not None and asked else {},
        pairings=side_by_side(old_answers, new_answers),
    )
    if out is not None:
        result.save(out)
    return result


def _measured(bench: Bench, policy: Policy, judge: str | None, name: str) -> tuple[Figures, Answers]:
    """Return one policy's figures, and its answers with their scores."""
    answers = bench.scored_answers(policy, judge, name=name)
    figures: Figures = generation_figures(answers) | bench.reward_figures(answers)
    if bench.settings.is_set("demonstrations"):
        figures |= bench.perplexity(policy, name=name)
    return figures, answers


def _question(prompt: Prompt) -> str:
    """Return a chat's last turn, without its template, or a plain prompt's text."""
    return str(prompt.messages[-1].get("content") or "") if prompt.messages else prompt.text


def _cell(figure: Interval | float | None, *, signed: bool = False) -> str:
    if figure is None:
        return ""
    value, between, _ = figure_cells(figure)
    sign = "+" if signed and not value.startswith("-") else ""
    # Non-breaking spaces within the interval: a narrow terminal breaks the cell before it.
    return f"{sign}{value} {between.replace(' ', NO_BREAK)}" if between else f"{sign}{value}"
