"""Order pairs of answers by a stronger measure ("gold"), or make pairs of sampled answers by it.

    preferences -> both answers scored -> the better one is chosen -> rows, agreement with the labels they had
    answers     -> all answers of a prompt scored -> the best against the worst, or every two -> rows

Rows are of the dialect prompt/chosen/rejected with `chosen_score` and `rejected_score`; rewards and DPO train on them.
Left out: tokens. Answers are read as texts, so a rule that counts tokens is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from plaudit.data.fields import TEMPLATE_COLUMNS, DataError, Message
from plaudit.data.files import ignore
from plaudit.data.formats import check_columns, demonstration_of, named, preference_of, sample
from plaudit.data.oasst import unfolded
from plaudit.data.read import scan_rows
from plaudit.data.records import DEMONSTRATION, PREFERENCE, Pair, Sample
from plaudit.data.write import ask, pair_row, write_rows
from plaudit.evaluate.evaluation import figure_cells, figure_json
from plaudit.evaluate.measures import Measures
from plaudit.evaluate.policy import Answer, Answers, scored
from plaudit.evaluate.preference import margin_figures
from plaudit.evaluate.settings import RelabelSettings
from plaudit.evaluate.statistics import Interval, share_interval
from plaudit.monitor.console import Reporter, of_figures
from plaudit.rewards.functions import FunctionReward
from plaudit.rewards.rubric import CONSISTENT
from plaudit.support.paths import at_home, write_whole, written_whole
from plaudit.support.plugins import load_plugins
from plaudit.support.visible import visible
from plaudit.types import Completion, Finish, Prompt

if TYPE_CHECKING:
    from rich.table import Table

OWN = frozenset({"prompt", "chosen", "rejected", "margin", "chosen_score", "rejected_score", "agrees"})
"""Columns that are written anew; a source row's columns of these names are left out."""


@dataclass(slots=True)
class Candidates:
    """A prompt with its different answers, and the pairs of them that are labelled already (better, worse)."""

    sample: Sample
    answers: list[tuple[str, Message]]
    labelled: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Relabelling:
    """Counts of what happened to the pairs, and figures of the agreement."""

    settings: RelabelSettings
    rows: int
    """Rows that were read."""
    bad: tuple[str, ...]
    pairs: int
    """All pairs: those that were scored, and those that could not be."""
    written: int
    swapped: int
    """Pairs whose order has changed."""
    ties: int
    unscored: int
    """Pairs left out since an answer has no score."""
    reasons: tuple[str, ...]
    """Why answers have no score, for the first few."""
    figures: dict[str, Interval]
    """agreement: share of labelled pairs that the measure orders alike, ties counting half; margin: mean difference of
    the scores, as they were labelled. Pairs of one prompt are averaged first. consistent: share of comparisons by a
    language model whose two orders agree."""

    def json(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if name not in ("settings", "figures")}
        figures = {name: figure_json(figure) for name, figure in self.figures.items()}
        return {"settings": dataclasses.asdict(self.settings), **counts, "figures": figures}

    def table(self) -> Table:
        """Counts and figures for a terminal."""
        counts = ("rows", "pairs", "written", "swapped", "ties", "unscored")
        rows = [(name, str(vars(self)[name]), "", "") for name in counts]
        rows += [(name, *figure_cells(figure)) for name, figure in self.figures.items()]
        return of_figures(f"Relabelled: {self.settings.output}", ("", "value", "95 % interval", "n"), rows)


def relabel(settings: RelabelSettings, *, reporter: Reporter | None = None) -> Relabelling:
    """Write the pairs to `settings.output` and the report beside it (.report.json). Raises ValueError if no pair is
    left, and for contradictions before anything is loaded."""
    load_plugins(settings.plugins)
    settings.check()
    reporter = reporter or Reporter(quiet=True)
    measures = Measures(settings, reporter.say, as_chat=settings.as_chat)
    bad: list[str] = []
    samples = list(_samples(settings, bad))
    asked = _by_prompt(samples) if settings.answers else [_of_pairs(one) for one in samples]
    reward = measures.rewards(settings.judge, None)
    for name, one in reward.items():
        if isinstance(one, FunctionReward) and any(
            argument in ("tokens", "token_count") for argument, _ in one.arguments
        ):
            raise ValueError(f"{name} reads an answer's tokens, and these are texts: name a measure of the text")
    answers = [_answers(one, settings) for one in asked]
    prompts = [group[0].prompt for group in answers if group]
    measures.check_columns(prompts)
    result, rows = _ordered(settings, asked, scored(answers, reward))
    result = replace(result, rows=len(samples) + len(bad), bad=tuple(bad))
    if not rows:
        why = f", the first reason: {result.reasons[0]}" if result.reasons else ""
        raise ValueError(
            f"no pair is left of {len(samples)} rows: {result.ties} ties, {result.unscored} without a score{why}"
        )
    out = at_home(str(settings.output))
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(out) as part:
        write_rows(part, rows)
    report = visible(json.dumps(result.json(), indent=1, ensure_ascii=False))
    write_whole(out.with_suffix(".report.json"), report + "\n")
    return result


def _samples(settings: RelabelSettings, bad: list[str]) -> Iterator[Sample]:
    """Yield the rows of all sources. Errors of unreadable ones go to `bad`; more than `bad_rows` raise DataError."""
    check_columns(settings.columns)
    if settings.dialect != "auto":
        named(settings.dialect)
    kind = DEMONSTRATION if settings.answers else PREFERENCE
    for source in settings.sources:
        rows = unfolded(scan_rows(source, split=settings.split), kind, ignore)
        for where, row in islice(rows, settings.limit):
            try:
                if isinstance(row, DataError):
                    raise row
                read, _ = sample(row, kind=kind, where=where, dialect=settings.dialect, columns=settings.columns)
                if kind == DEMONSTRATION:
                    yield demonstration_of(read)
                else:
                    yield preference_of(read)
            except DataError as error:
                bad.append(str(error))
                if len(bad) > settings.bad_rows:
                    raise


def _of_pairs(one: Sample) -> Candidates:
    answers: list[tuple[str, Message]] = []
    labelled = []
    for pair in one.pairs:
        both = (pair.chosen, pair.chosen_turn), (pair.rejected, pair.rejected_turn)
        answers += [answer for answer in both if answer not in answers]
        labelled.append((answers.index(both[0]), answers.index(both[1])))
    return Candidates(one, answers, labelled)


def _by_prompt(samples: list[Sample]) -> list[Candidates]:
    """Join rows with equal prompts; equal answers count once."""
    found: dict[str, Candidates] = {}
    for one in samples:
        asked = found.setdefault(json.dumps([ask(one), one.arguments], default=str), Candidates(one, [], []))
        answer = (one.answer or "", one.turn)
        if answer not in asked.answers:
            asked.answers.append(answer)
    return list(found.values())


def _answers(asked: Candidates, settings: RelabelSettings) -> list[Answer]:
    """Return the answers in the form that rewards read: texts without tokens."""
    one = asked.sample
    turns = one.messages or (({"role": "user", "content": one.prompt},) if settings.as_chat else ())
    text = one.prompt or "\n\n".join(str(turn["content"]) for turn in one.messages)
    reference = None if settings.answers else one.answer
    reference = reference if reference is not None else one.extra.get("answer")
    prompt = Prompt(
        id=one.where,
        text=text,
        tokens=(),
        answer=None if reference is None else str(reference),
        messages=turns,
        extra=one.extra,
    )
    finish = one.extra.get("finish") if settings.answers else None
    ended = Finish(finish) if finish in list(Finish) else Finish.EOS
    return [
        Answer(prompt=prompt, completion=Completion(tokens=(), logprobs=(), versions=(), text=answer, finish=ended))
        for answer, _ in asked.answers
    ]


def _ordered(
    settings: RelabelSettings, asked: list[Candidates], answers: Answers
) -> tuple[Relabelling, list[dict[str, Any]]]:
    """Order each pair by its scores. Return the counts and the rows to write."""
    rows: list[dict[str, Any]] = []
    reasons: list[str] = []
    margins: list[float] = []
    groups: list[int] = []
    orders: list[float] = []
    pairs = swapped = ties = unscored = 0
    for number, (one, group) in enumerate(zip(asked, answers, strict=True)):
        scores = [next(iter(answer.scores.values())) for answer in group]
        reasons += [str(score.reason) for score in scores if score.value is None][: 5 - len(reasons)]
        values = [score.value for score in scores]
        agreed = [score.parts[CONSISTENT] for score in scores if CONSISTENT in score.parts]
        orders += [fmean(agreed)] if agreed else []
        for first, second in one.labelled or _made(values, settings):
            pairs += 1
            a, b = values[first], values[second]
            if a is None or b is None:
                unscored += 1
                continue
            tied = abs(a - b) <= settings.tie
            better, worse = (first, second) if a >= b or tied else (second, first)
            if one.labelled:
                margins.append(0.0 if tied else a - b)
                groups.append(number)
            ties += tied
            swapped += better != first
            if not tied or settings.ties == "keep":
                rows.append(_row(one, (better, values[better]), (worse, values[worse]), agrees=better == first))
    figures = margin_figures(margins, groups) if margins else {}
    if figures:
        figures = {"agreement": figures["accuracy"], "margin": figures["margin"]}
    figures |= {CONSISTENT: share_interval(orders)} if orders else {}
    result = Relabelling(
        settings=settings,
        rows=0,
        bad=(),
        pairs=pairs,
        written=len(rows),
        swapped=swapped,
        ties=ties,
        unscored=unscored,
        reasons=tuple(reasons),
        figures=figures,
    )
    return result, rows


def _made(values: list[float | None], settings: RelabelSettings) -> list[tuple[int, int]]:
    """Pair unlabelled answers that have scores, better one first: all pairs, or best with worst; [] for one answer."""
    known = sorted((i for i, value in enumerate(values) if value is not None), key=lambda i: -(values[i] or 0.0))
    if settings.pairs == "all":
        return list(combinations(known, 2))
    return [(known[0], known[-1])] if len(known) > 1 else []


def _row(one: Candidates, chosen: tuple[int, Any], rejected: tuple[int, Any], *, agrees: bool) -> dict[str, Any]:
    (better, best), (worse, worst) = (one.answers[chosen[0]], chosen[1]), (one.answers[rejected[0]], rejected[1])
    pair = Pair(chosen=better[0], chosen_turn=better[1], rejected=worse[0], rejected_turn=worse[1])
    row = pair_row(one.sample, pair) | {"chosen_score": best, "rejected_score": worst}
    if one.labelled:
        further = {name: value for name, value in one.sample.extra.items() if name not in OWN}
        return row | {"agrees": agrees} | further
    return row | {name: one.sample.extra[name] for name in TEMPLATE_COLUMNS if name in one.sample.extra}
