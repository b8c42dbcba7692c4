"""The pictures and tables of the studies (`studies.py`): docs/results/STUDY.json -> STUDY.png, Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reviews
from studies import (
    ANSWERS,
    CORRECTIONS,
    FAMILIES,
    LAGS,
    METHODS,
    MINIBATCHES,
    PAIRS,
    SAMPLED,
    SIZES,
    Found,
    gao,
    interval,
    lagging,
    last,
    over_seeds,
)

from plaudit.monitor.plots import PALETTE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawn(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a picture in the style of the project's plots."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path)


def frontier(found: Found, path: Path) -> None:
    """Gold against KL: a line a method, a point each twenty steps, the last one larger, means over the seeds; bars are
    the seeds' range."""
    families = {title: family for title, family in FAMILIES.items() if found.keys() & family.keys()}

    def draw(figure: Any) -> None:
        for axes, family in _side_by_side(figure, families, "KL to the SFT policy, nats an answer", "gold reward"):
            for number, (recipe, name) in enumerate(family.items()):
                if points := found.get(recipe):
                    _line(axes, points, name, PALETTE[number])
            axes.legend(loc="lower right")

    drawn(path, (4.5 * len(families), 4.3), draw)


def _side_by_side(figure: Any, panels: Mapping[str, Any], x: str, y: str) -> Iterator[tuple[Axes, Any]]:
    """Yield axes of one scale with a title each, and what each is to show."""
    shared = None
    for column, (title, content) in enumerate(panels.items(), start=1):
        axes = shared = figure.add_subplot(1, len(panels), column, sharex=shared, sharey=shared)
        axes.set_title(title)
        axes.set_xlabel(x)
        yield axes, content
    figure.axes[0].set_ylabel(y)


def _line(axes: Axes, points: Any, name: str, colour: str) -> None:
    kl, gold = over_seeds(points, "kl"), over_seeds(points, "gold")
    axes.plot(kl, gold, "o-", color=colour, markersize=3.5, linewidth=1.6, label=name)
    axes.plot(kl[-1], gold[-1], "o", color=colour, markersize=7)
    ends = last(points, "gold")
    axes.vlines(kl[-1], min(ends), max(ends), color=colour, linewidth=1, alpha=0.6)


def over(found: Found, path: Path) -> None:
    """Judge's and gold reward against d = sqrt(KL), for judges of three sizes and of three amounts of data."""
    sizes = {f"over_{n}": f"width {w}, layers: {k}" for n, (w, k) in SIZES.items()}
    amounts = {f"over_{n}": f"{n:,} pairs" for n in PAIRS}
    panels = {
        "judges of three sizes": sizes | {"over_whole": "width 192, layers: 3"},
        "judges of three amounts of data": amounts | {"over_whole": "12,000 pairs"},
    }
    x, y = "d = sqrt(KL), KL in nats an answer", "gain: gold (points, fitted line), judge (dashed)"

    def draw(figure: Any) -> None:
        for axes, lines in _side_by_side(figure, panels, x, y):
            for number, (name, label) in enumerate(lines.items()):
                if points := found.get(name):
                    _optimised(axes, points, label, PALETTE[number])
            axes.legend(loc="lower left")

    drawn(path, (11, 4.5), draw)


def _optimised(axes: Axes, points: Any, label: str, colour: str) -> None:
    pairs = gained(points, "gold")
    d = [math.sqrt(max(kl, 0)) for kl, _ in pairs]
    alpha, beta, _ = gao(pairs)
    axes.plot(d, [gold for _, gold in pairs], "o", color=colour, markersize=3.5, label=label)
    grid = [max(d) * k / 100 for k in range(1, 101)]
    axes.plot(grid, [x * (alpha - beta * math.log(x)) for x in grid], color=colour, linewidth=1.6)
    judged = sorted(gained(points, "judge"))
    axes.plot([math.sqrt(max(kl, 0)) for kl, _ in judged], [r for _, r in judged], "--", color=colour, linewidth=1.1)


def gained(points: Any, figure: str) -> list[tuple[float, float]]:
    """(KL, reward less the SFT policy's) at each step, means over the seeds; the first point is the SFT policy."""
    values = over_seeds(points, figure)
    return list(zip(over_seeds(points, "kl"), [value - values[0] for value in values], strict=True))


def off_policy(found: Found, path: Path) -> None:
    """Gold at the end against mini-batches a rollout, and against the lag for each correction."""

    def draw(figure: Any) -> None:
        left = figure.add_subplot(1, 2, 1)
        _means(left, found, [(n, f"minibatches_{n}") for n in MINIBATCHES], "gold", PALETTE[0])
        left.set_title("mini-batches a rollout")
        left.set_xlabel(f"optimizer steps on the same {ANSWERS} answers")
        right = figure.add_subplot(1, 2, 2, sharey=left)
        for number, how in enumerate(CORRECTIONS):
            names = [(0, "minibatches_4"), *((lag, lagging(lag, how)) for lag in LAGS)]
            _means(right, found, names, how, PALETTE[number])
        right.set_title("lag, 4 optimizer steps a version")
        right.set_xlabel("most policy versions that a sample may be old")
        right.legend(loc="lower left")
        left.set_xscale("log", base=2)
        left.set_xticks(MINIBATCHES, [str(n) for n in MINIBATCHES])
        left.set_ylabel("gold reward after 60 rollouts")

    drawn(path, (11, 4.3), draw)


def _means(axes: Axes, found: Found, names: Sequence[tuple[int, str]], label: str, colour: str) -> None:
    there = [(x, last(found[name], "gold")) for x, name in names if found.get(name)]
    means = [sum(values) / len(values) for _, values in there]
    axes.plot([x for x, _ in there], means, "o-", color=colour, markersize=4, label=label)
    for x, values in there:
        axes.vlines(x, min(values), max(values), color=colour, linewidth=1, alpha=0.6)


def tables(found: Mapping[str, Found], shown: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The studies' tables in Markdown, and answers to the same prompts side by side."""
    ends = {
        "gold": "gold",
        "win": "wins over SFT",
        "judge": "judge's reward",
        "kl": "KL, nats",
        "length": "length, tokens",
    }
    yield from _ends("Every method on the demo", "method", names=METHODS, found=found["frontier"], figures=ends)
    titles = ("judge", "seeds", "alpha", "beta", "R²", "most gold gained", "at a KL of", "gold gained at the end")
    optimised = [(name.removeprefix("over_"), points) for name, points in found["over"].items()]
    yield from _table("Over-optimisation", titles, [_fitted(name, points) for name, points in optimised])
    ends = {"gold": "gold", "kl": "KL, nats", "length": "length, tokens"}
    stale = {f"minibatches_{n}": f"mini-batches: {n}" for n in MINIBATCHES}
    stale |= {lagging(lag, how): f"lag {lag}, {how}" for lag in LAGS for how in CORRECTIONS}
    yield from _ends("Samples older than the weights", "samples", names=stale, found=found["off_policy"], figures=ends)
    samples = {f"samples_{k}": str(k) for k in SAMPLED}
    yield from _ends(
        f"Samples a prompt, {ANSWERS} answers a step", "samples", names=samples, found=found["samples"], figures=ends
    )
    names = {
        f"{name}_{value:g}": f"{title}, {key.partition('.')[2]}={value:g}"
        for name, title in reviews.TITLES.items()
        for key, values in (reviews.SWEPT[name],)
        for value in values
    }
    ends |= {"judge": "judge's reward", "perplexity": "perplexity by SFT", "distinct": "distinct pairs"}
    yield from _ends("Real reviews", "method", names=names, found=found["reviews"], figures=ends)
    if shown:
        columns = [[cell(text) for text in texts] for texts in shown.values()]
        yield from _table("Real reviews, answers side by side", tuple(shown), list(zip(*columns, strict=True)))


def reviewed(found: Found, path: Path) -> None:
    """Gold against KL on real reviews: a line through each variant's points, its end larger; best of n as crosses."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for number, (name, title) in enumerate(reviews.TITLES.items()):
            for order, value in enumerate(reviews.SWEPT[name][1]):
                if points := found.get(f"{name}_{value:g}"):
                    _line(axes, points, title if not order else "", PALETTE[number])
        for by, colour in (("gold", "black"), ("judge", "grey")):
            if own := found.get(f"best_of_n_{by}"):
                means = [
                    [sum(column) / len(own) for column in zip(*n, strict=True)] for n in zip(*own.values(), strict=True)
                ]
                axes.plot([m[1] for m in means], [m[2] for m in means], "x--", color=colour, label=f"best of n by {by}")
        axes.set_xlabel("KL to the SFT policy, nats an answer")
        axes.set_ylabel("gold: probability of positive")
        axes.legend(loc="lower right")

    drawn(path, (8, 5), draw)


def cell(text: str) -> str:
    """A text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _fitted(name: str, points: Any) -> list[Any]:
    pairs = gained(points, "gold")
    alpha, beta, explained = gao(pairs)
    kl, best = max(pairs, key=lambda pair: pair[1])
    figures = (alpha, beta, explained, best, kl, pairs[-1][1])
    return [name, len(points), *(f"{value:.2f}" for value in figures)]


def _ends(
    title: str, first: str, *, names: Mapping[str, str], found: Found, figures: Mapping[str, str]
) -> Iterator[str]:
    """A row for each variant that was measured: figures of its end, means over the seeds."""
    there = [(label, points) for name, label in names.items() if (points := found.get(name))]
    rows = [[label, len(points), *(interval(last(points, figure)) for figure in figures)] for label, points in there]
    yield from _table(title, (first, "seeds", *figures.values()), rows)


def _table(title: str, titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if rows:
        yield from (f"## {title}", "", f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}")
        yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
        yield ""


PICTURES: dict[str, Callable[[Found, Path], None]] = {
    "frontier": frontier,
    "over": over,
    "off_policy": off_policy,
    "reviews": reviewed,
}
