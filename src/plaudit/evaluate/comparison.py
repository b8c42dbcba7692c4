"""Compare two policies on the same prompts: how often one is better, by every reward that scored both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from plaudit.evaluate.generation import reward_mean, verdicts
from plaudit.evaluate.length import length_controlled
from plaudit.evaluate.policy import Advance, Answer, Answers, unheard
from plaudit.evaluate.statistics import Interval, mean_interval, share_interval
from plaudit.rewards.llm import UNPARSED, Decision, LlmJudge, asked_of
from plaudit.runtime.coroutines import finished, together
from plaudit.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two answers to one prompt."""

    prompt: Prompt
    first: Answer
    second: Answer


def comparison_figures(first: Answers, second: Answers, *, seed: int) -> dict[str, Interval]:
    """Return by reward: the first policy's win rate, ties, difference paired by prompt, and both means.

    A win counts 1, a tie 1/2, over the pairs of equally numbered answers; pairs that lack a score are left out.
    """
    figures: dict[str, Interval] = {}
    for name in first[0][0].scores:
        found = [_gaps(ours, theirs, name) for ours, theirs in zip(first, second, strict=True)]
        if not any(found):
            raise ValueError(f"the reward {name!r} scored no prompt's answers of both policies")
        wins = [[1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap, _ in group] for group in found]
        figures |= win_figures(name, wins, [[length for _, length in group] for group in found], seed=seed)
        gaps = [fmean(gap for gap, _ in group) for group in found if group]
        shares = verdicts(first, name) and verdicts(second, name)  # differences are then from -1 to 1
        figures[f"difference/{name}"] = (
            share_interval([(1 + gap) / 2 for gap in gaps]).map(lambda share: 2 * share - 1)
            if shares
            else mean_interval(gaps)
        )
        figures[f"reward/{name}/first"] = reward_mean(first, name)
        figures[f"reward/{name}/second"] = reward_mean(second, name)
    return figures


def win_figures(
    name: str, wins: Sequence[Sequence[float]], lengths: Sequence[Sequence[float]], *, seed: int
) -> dict[str, Interval]:
    """Return win rate, share of ties and length-controlled win rate. For each prompt's pairs, `wins` has the outcomes
    (1, 0, 1/2) and `lengths` the differences of lengths in characters. Prompts without pairs are left out."""
    compared = [(won, gaps) for won, gaps in zip(wins, lengths, strict=True) if won]
    ties = [fmean(win == 0.5 for win in won) for won, _ in compared]
    figures = {
        f"win_rate/{name}": share_interval([fmean(won) for won, _ in compared]),
        f"ties/{name}": share_interval(ties),
    }
    controlled = length_controlled([won for won, _ in compared], [gaps for _, gaps in compared], seed=seed)
    return figures if controlled is None else figures | {f"win_rate/{name}/length_controlled": controlled}


def _gaps(ours: list[Answer], theirs: list[Answer], name: str) -> list[tuple[float, float]]:
    """Return (score difference, length difference) of each pair in which both answers have a score."""
    return [
        (a - b, length_gap(one, other))
        for one, other in zip(ours, theirs, strict=True)
        if (a := one.scores[name].value) is not None and (b := other.scores[name].value) is not None
    ]


def length_gap(one: Answer, other: Answer) -> float:
    """Return len(one) - len(other) in characters, since tokens differ between tokenizers."""
    return float(len(one.completion.text) - len(other.completion.text))


def decided(pairings: Sequence[Pairing], judge: LlmJudge, advance: Advance = unheard) -> list[Decision]:
    """Ask a language model to decide every pair; return its decisions in the order of the pairs."""

    async def of(pairing: Pairing) -> Decision:
        texts = pairing.first.completion.text, pairing.second.completion.text
        decision = await judge.decide(asked_of(pairing.prompt), *texts)
        advance(1)
        return decision

    return finished(together(of(pairing) for pairing in pairings))


def decision_figures(
    pairings: Sequence[Pairing], decisions: Sequence[Decision], *, seed: int
) -> dict[str, Interval | float]:
    """Metrics of pairwise LLM verdicts: win rate, ties, order agreement, unparsed, failed. ValueError if no verdict."""
    wins: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    agreed: dict[str, list[float]] = {}
    for pairing, decision in zip(pairings, decisions, strict=True):
        if decision.value is not None:
            wins.setdefault(pairing.prompt.id, []).append(decision.value)
            gaps.setdefault(pairing.prompt.id, []).append(length_gap(pairing.first, pairing.second))
            agreed.setdefault(pairing.prompt.id, []).append(float(decision.consistent))
    if not wins:
        raise ValueError(f"the language model decided no pair; the first reason: {decisions[0].reason}")
    unparsed = sum(decision.reason == UNPARSED for decision in decisions)
    return {
        **win_figures("llm", list(wins.values()), list(gaps.values()), seed=seed),
        "consistent/llm": share_interval([*map(fmean, agreed.values())]),
        "unparsed/llm": float(unparsed),
        "failed/llm": float(sum(decision.value is None for decision in decisions) - unparsed),
    }


def side_by_side(first: Answers, second: Answers) -> list[Pairing]:
    """Pair the k-th answers of both policies to each prompt, in the order of the prompts."""
    return [
        Pairing(prompt=one.prompt, first=one, second=other)
        for ours, theirs in zip(first, second, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]


def pairing_json(pairing: Pairing, names: tuple[str, str], decision: Decision | None = None) -> Mapping[str, Any]:
    """Return one line of the file of pairs, with each answer under its policy's name."""
    answers = zip(names, (pairing.first, pairing.second), strict=True)
    texts = {name: {key: value for key, value in answer.json().items() if key != "prompt"} for name, answer in answers}
    said = {} if decision is None else {"llm": {"value": decision.value, "replies": decision.replies}}
    return {"prompt": pairing.prompt.text, **texts, **said}
