"""The pictures and tables of the studies (`studies.py`): docs/results/STUDY.json -> STUDY.png, Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import episodes
import gym
import reviews
import studies
from studies import Found, interval, last, over_seeds

from plaudit.monitor.plots import PALETTE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[[Found, Any], None]


def picture(width: float, height: float) -> Callable[[Draw], Callable[[Found, Path], None]]:
    """Let a function that draws write its picture, in the style of the project's plots."""

    def of(draw: Draw) -> Callable[[Found, Path], None]:
        def write(found: Found, path: Path) -> None:
            from matplotlib import rc_context
            from matplotlib.figure import Figure

            with rc_context(fname=STYLE):
                figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
                draw(found, figure)
                figure.savefig(path)

        return write

    return of


@picture(13.5, 4.3)
def frontier(found: Found, figure: Any) -> None:
    """Gold against KL: a line a method, a point each twenty steps, the last one larger, means over the seeds; bars are
    the seeds' range."""
    _panels(figure, found, studies.FAMILIES, _line, "KL to the SFT policy, nats an answer", "gold reward")


def _panels(figure: Any, found: Found, panels: Mapping[str, Mapping[str, str]], line: Any, x: str, y: str) -> None:
    """Draw titled panels of one scale side by side, each with a line for some variants, given with their labels."""
    axes = None
    for column, (title, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), column, sharex=axes, sharey=axes)
        axes.set(title=title, xlabel=x, ylabel=y if column == 1 else "")
        for number, (name, label) in enumerate(lines.items()):
            if points := found.get(name):
                line(axes, points, label, PALETTE[number])
        axes.legend()


def _line(axes: Axes, points: Any, label: str, colour: str) -> None:
    kl, gold = over_seeds(points, "kl"), over_seeds(points, "gold")
    axes.plot(kl, gold, "o-", color=colour, markersize=3.5, linewidth=1.6, label=label)
    axes.plot(kl[-1], gold[-1], "o", color=colour, markersize=7)
    ends = last(points, "gold")
    axes.vlines(kl[-1], min(ends), max(ends), color=colour, linewidth=1, alpha=0.6)


@picture(11, 4.5)
def over(found: Found, figure: Any) -> None:
    """Judge's and gold reward against d = sqrt(KL), for judges of three sizes and of three amounts of data."""
    sizes = {f"over_{n}": f"width {w}, layers: {k}" for n, (w, k) in studies.SIZES.items()}
    amounts = {f"over_{n}": f"{n:,} pairs" for n in studies.PAIRS}
    panels = {
        "judges of three sizes": sizes | {"over_whole": "width 192, layers: 3"},
        "judges of three amounts of data": amounts | {"over_whole": "12,000 pairs"},
    }
    y = "gain: gold of each seed, judge's mean (dashed)"
    _panels(figure, found, panels, _optimised, "d = sqrt(KL), KL in nats an answer", y)


def _optimised(axes: Axes, points: Any, label: str, colour: str) -> None:
    for number, seed in enumerate(points):
        pairs = sorted(gained({seed: points[seed]}, "gold"))
        d = [math.sqrt(max(kl, 0)) for kl, _ in pairs]
        told = None if number else label
        axes.plot(d, [gold for _, gold in pairs], "o-", color=colour, markersize=3, linewidth=1, alpha=0.8, label=told)
    judged = sorted(gained(points, "judge"))
    axes.plot([math.sqrt(max(kl, 0)) for kl, _ in judged], [r for _, r in judged], "--", color=colour, linewidth=1.1)


def gained(points: Any, figure: str) -> list[tuple[float, float]]:
    """(KL, reward less the SFT policy's) at each step, means over the seeds; the first point is the SFT policy."""
    values = over_seeds(points, figure)
    return list(zip(over_seeds(points, "kl"), [value - values[0] for value in values], strict=True))


@picture(11, 4.3)
def off_policy(found: Found, figure: Any) -> None:
    """Gold at the end against mini-batches a rollout, and against the lag for each correction."""
    left = figure.add_subplot(1, 2, 1)
    right = figure.add_subplot(1, 2, 2, sharey=left)
    x, steps = f"optimizer steps on the same {studies.ANSWERS} answers", studies.MINIBATCHES
    left.set(title="mini-batches a rollout", xlabel=x, ylabel="gold reward after 60 rollouts")
    _means(left, found, {n: f"minibatches_{n}" for n in steps}, "gold", PALETTE[0])
    left.set_xscale("log", base=2)
    left.set_xticks(steps, [str(n) for n in steps])
    x = "most policy versions that a sample may be old"
    right.set(title="lag, 4 optimizer steps a version", xlabel=x)
    for number, how in enumerate(studies.CORRECTIONS):
        names = {0: "minibatches_4"} | {lag: studies.lagging(lag, how) for lag in studies.LAGS}
        _means(right, found, names, how, PALETTE[number])
    right.legend(loc="lower left")


def _means(axes: Axes, found: Found, names: Mapping[int, str], label: str, colour: str) -> None:
    there = {x: last(found[name], "gold") for x, name in names.items() if found.get(name)}
    axes.plot(list(there), [fmean(values) for values in there.values()], "o-", color=colour, markersize=4, label=label)
    for x, values in there.items():
        axes.vlines(x, min(values), max(values), color=colour, linewidth=1, alpha=0.6)


ENDS = {
    "gold": "gold",
    "win": "wins over SFT",
    "judge": "judge's reward",
    "kl": "KL, nats",
    "length": "length, tokens",
    "perplexity": "perplexity by SFT",
    "distinct": "distinct pairs",
}


def tables(found: Mapping[str, Found], shown: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The studies' tables in Markdown, and answers to the same prompts side by side."""
    yield from _ends("Every method on the demo", "method", studies.METHODS, found["frontier"], tuple(ENDS)[:5])
    titles = ("judge", "seed", "alpha", "beta", "R²", "R² of a line", "most gold gained", "at a KL of", "at the end")
    fitted = [
        [name.removeprefix("over_"), seed, *_fitted({seed: own})]
        for name, points in found["over"].items()
        for seed, own in points.items()
    ]
    yield from _table("Over-optimisation", titles, fitted)
    few = ("gold", "kl", "length")
    stale = {f"minibatches_{n}": f"mini-batches: {n}" for n in studies.MINIBATCHES}
    stale |= {studies.lagging(n, how): f"lag {n}, {how}" for n in studies.LAGS for how in studies.CORRECTIONS}
    yield from _ends("Samples older than the weights", "samples", stale, found["off_policy"], few)
    names = {f"samples_{k}": str(k) for k in studies.SAMPLED}
    title = f"Samples a prompt, {studies.ANSWERS} answers a step"
    yield from _ends(title, "samples", names, found["samples"], few)
    many = (*few, "judge", "perplexity", "distinct")
    yield from _ends("Real reviews", "method", reviews.TITLES, found["reviews"], many)
    tried = {variant.name: variant.name.replace("_", " ") for variant in reviews.TRIALS}
    yield from _ends("Real reviews, the choice of the rate on other prompts", "method", tried, found["reviews"], many)
    if shown:
        yield from ("## Real reviews, answers side by side", "")
        for prompt, *answers in zip(*shown.values(), strict=True):
            pairs = zip([*shown][1:], answers, strict=True)
            yield from (f"**{escaped(prompt)} ...**", "", *(f"- {name}: {escaped(text)}" for name, text in pairs), "")


@picture(8, 5)
def reviewed(found: Found, figure: Any) -> None:
    """Gold against KL on real reviews: a line a variant, its end larger; best of n as crosses."""
    axes = figure.add_subplot()
    for number, (name, title) in enumerate(reviews.TITLES.items()):
        if points := found.get(name):
            _line(axes, points, title, (*PALETTE, "#c9a227")[number])
    for by, colour in (("gold", "black"), ("judge", "grey")):
        if own := found.get(f"best_of_n_{by}"):
            kl, gold = (
                [fmean(point[column] for point in n) for n in zip(*own.values(), strict=True)] for column in (1, 2)
            )
            axes.plot(kl, gold, "x--", color=colour, label=f"best of n by {by}")
    axes.set(xlabel="KL to the SFT policy, nats an answer", ylabel="gold: probability of positive")
    axes.legend(loc="lower right")


@picture(12, 3.8)
def gym_arms(found: Found, figure: Any) -> None:
    """Share of right answers of each arm, a panel a task: means over the seeds, lines are the seeds' range; pass@8 as
    crosses, and dashed what always the commonest answer has."""
    kept: Mapping[str, Any] = found
    for column, task in enumerate(gym.TASKS, start=1):
        axes = figure.add_subplot(1, len(gym.TASKS), column)
        axes.set(title=task, ylim=(0, 1), ylabel="" if column > 1 else "right answers to test questions")
        axes.set_xticks(range(len(gym.ARMS)), gym.SHORT, rotation=20)
        for place, arm in enumerate(gym.ARMS):
            if own := [*kept.get(f"{task}/{arm}", {}).values()]:
                right, often = ([figures[name] for figures in own] for name in ("right", "pass"))
                axes.bar(place, fmean(right), color=PALETTE[place], width=0.7)
                axes.vlines(place, min(right), max(right), color="black", linewidth=1)
                axes.plot(place, fmean(often), "x", color="black", label="" if place else "pass@8")
        if always := [*kept.get(f"{task}/always", {}).values()]:
            level = fmean(one["right"] for one in always)
            axes.axhline(level, color="black", linestyle="--", linewidth=0.8, label="always the commonest")
            axes.legend(loc="upper left")


def gym_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """A table a task: figures of each arm, means over the seeds."""
    titles = ("arm", "seeds", "right", "each seed (95 % interval)", "pass@8", "tokens", "cut off", "CPU minutes")
    for task in gym.TASKS:
        rows = [
            [title, len(own), *_gym_cells(own)]
            for arm, title in gym.ARMS.items()
            if (own := [*found.get(f"{task}/{arm}", {}).values()])
        ]
        if always := [one["right"] for one in found.get(f"{task}/always", {}).values()]:
            rows.append(["always the commonest answer", len(always), interval(always), "", "", "", "", ""])
        yield from _table(f"reasoning-gym: {task}", titles, rows)


def _gym_cells(own: Sequence[Mapping[str, float]]) -> list[str]:
    right, often, length = (interval([figures[name] for figures in own]) for name in ("right", "pass", "length"))
    each = ", ".join(f"{one['right']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in own)
    cut, seconds = (fmean(one[name] for one in own) for name in ("unfinished", "cpu"))
    return [right, each, often, length, f"{cut:.0%}", f"{seconds / 60:.1f}"]


@picture(10, 3.8)
def episode_arms(found: Found, figure: Any) -> None:
    """Right answers to sums, and guesses a game, of each arm: means over the seeds, lines are the seeds' range."""
    kept: Mapping[str, Any] = found
    for column, (task, arms) in enumerate(episodes.TASKS.items(), start=1):
        axes = figure.add_subplot(1, 2, column)
        axes.set(title=task, ylabel="right answers" if task == "calculator" else "guesses a game")
        axes.set_xticks(range(len(arms)), [episodes.SHORT[arm] for arm in arms])
        for place, arm in enumerate(arms):
            if own := [figures["value"] for figures in kept.get(f"{task}/{arm}", {}).values()]:
                axes.bar(place, fmean(own), color=PALETTE[[*episodes.ARMS].index(arm)], width=0.7)
                axes.vlines(place, min(own), max(own), color="black", linewidth=1)
        axes.set_axisbelow(True)
        if task == "guess":
            axes.axhline(episodes.OPTIMAL, color="black", linestyle="--", linewidth=0.8, label="halving, the optimum")
            axes.legend(loc="upper right")


def episode_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """A table a task: figures of each arm, means over the seeds."""
    more = ("seeds", "each seed (95 % interval)", "turns", "calls", "unread calls", "cut off", "CPU minutes")
    for task, arms in episodes.TASKS.items():
        rows = []
        for arm in arms:
            if own := [*found.get(f"{task}/{arm}", {}).values()]:
                each = ", ".join(f"{one['value']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in own)
                means = [f"{fmean(one[name] for one in own):.2f}" for name in ("turns", "calls", "unread_calls")]
                cut, seconds = (fmean(one[name] for one in own) for name in ("unfinished", "cpu"))
                value = interval([one["value"] for one in own])
                rows.append([episodes.ARMS[arm], value, len(own), each, *means, f"{cut:.0%}", f"{seconds / 60:.1f}"])
        title = "right" if task == "calculator" else "guesses"
        yield from _table(f"Episodes: {task}", ("arm", title, *more), rows)


def escaped(text: str) -> str:
    """A text on one line of Markdown, as it is."""
    return re.sub(r"([\\`*_\[\]<|])", r"\\\1", " ".join(text.split()))


def _fitted(points: Any) -> list[str]:
    pairs = gained(points, "gold")
    kl, best = max(pairs, key=lambda pair: pair[1])
    return [f"{value:.2f}" for value in (*studies.gao(pairs), best, kl, pairs[-1][1])]


def _ends(title: str, first: str, names: Mapping[str, str], found: Found, figures: Sequence[str]) -> Iterator[str]:
    """A row for each variant that was measured: figures of its end, means over the seeds."""
    there = [(label, points) for name, label in names.items() if (points := found.get(name))]
    rows = [[label, len(points), *(interval(last(points, figure)) for figure in figures)] for label, points in there]
    yield from _table(title, (first, "seeds", *(ENDS[figure] for figure in figures)), rows)


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if rows:
        yield from (f"## {title}", "", f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}")
        yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
        yield ""


PICTURES = {
    "frontier": frontier,
    "over": over,
    "off_policy": off_policy,
    "reviews": reviewed,
    "gym": gym_arms,
    "episodes": episode_arms,
}
