"""Draws losses, accuracy, rewards, KL and entropy of one run, or of all runs in a folder, as PNG files.

    metrics.jsonl of each run -> curves -> panels (one a quantity, a line a run) -> loss.png, reward.png, ...

Left out: interaction and live updates. matplotlib is imported on drawing only, without pyplot and its global state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.monitor.console import STAMP
from plaudit.monitor.figures import FIGURES
from plaudit.monitor.folders import changed
from plaudit.monitor.sinks import read_figures
from plaudit.support.bounded import opened
from plaudit.support.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS, LOG = "metrics.jsonl", "log.txt"
PALETTE = ("#1f6fb4", "#d9652b", "#3a9a5b", "#8a5bb5", "#b8435e", "#7a6a4f", "#2ba3a8", "#8c8c8c")
LARGEST = 1e100
"""Largest number that is drawn: matplotlib cannot place 1e308 and -1e308 on one axis."""
LINES = ("-", ":", "-.")
"""Line styles, which tell runs apart when they share a colour."""
STYLE = Path(__file__).with_suffix(".mplstyle")
PLOTS = {plot: [one for one in FIGURES if one.plot == plot] for plot in ("loss", "accuracy", "reward", "kl", "entropy")}
"""The figures of each picture."""
PLOT_TYPES = (*PLOTS, "all")


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """The records of one run and the name that the legend shows."""

    name: str
    stage: str
    """The run's own folder name: "sft", "ppo"."""
    records: Sequence[dict[str, Any]]

    def curve(self, metric: str) -> PlottedCurve:
        """Return a metric's points, without steps in which it is missing or not finite."""
        points = [(r["step"], r[metric]) for r in self.records if drawable(r.get("step")) and drawable(r.get(metric))]
        return PlottedCurve(self.name, [step for step, _ in points], [value for _, value in points])

    def validation(self, metric: str) -> PlottedCurve:
        """Points of a metric from evaluations."""
        measured = self.curve(f"validation/{metric}")
        return PlottedCurve(f"{self.name}, validation", measured.steps, measured.values, True)


@dataclass(frozen=True, slots=True)
class PlottedCurve:
    label: str
    steps: Sequence[float]
    values: Sequence[float]
    measured: bool = False
    """True if it is drawn as points: occasional measurements such as validation losses."""


@dataclass(slots=True)
class Panel:
    title: str
    unit: str
    curves: list[PlottedCurve] = field(default_factory=list)


def drawable(value: Any) -> bool:
    """True for a number that matplotlib can place on an axis."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


def draw(
    log_dir: Path, plot_type: str = "all", out: Path | None = None, *, say: Callable[[str], None] = print
) -> list[Path]:
    """Write `<plot_type>.png` for the runs under `log_dir` into `out` (default: `log_dir`/plots); return the files.

    `say` gets a line for each run that cannot be read and is left out. "all" draws every type that has
    figures. Raises ValueError if there is nothing to draw.
    """
    if plot_type not in PLOT_TYPES:
        raise ValueError(f"plot_type={plot_type!r} is unknown. Choose one of: {', '.join(PLOT_TYPES)}.")
    runs = find_runs(log_dir, say)
    wanted = list(PLOTS) if plot_type == "all" else [plot_type]
    plots = {name: panels for name in wanted if (panels := _panels(name, runs))}
    if not plots:
        metrics = [figure.name for name in wanted for figure in PLOTS[name]]
        raise ValueError(
            f"Nothing to draw for plot_type={plot_type!r}: none of {', '.join(metrics)} is in "
            f"{', '.join(str(Path(run.name) / METRICS) for run in runs)} under {log_dir}. "
            "Choose another type, or wait for the run's first steps."
        )
    folder = log_dir / "plots" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    return [_save(panels, folder / f"{name}.png") for name, panels in plots.items()]


def draw_together(runs: Sequence[PlottedRun], path: Path) -> Path | None:
    """Write one picture with a panel for each recorded quantity, and return its path; None if there is none."""
    panels = [panel for name in PLOTS for panel in _panels(name, runs)]
    return _save(panels, path) if panels else None


def find_runs(log_dir: Path, say: Callable[[str], None] = print) -> list[PlottedRun]:
    """Return the runs in the folder or below it, oldest first. `say` gets the reasons why runs are left out."""
    if not log_dir.is_dir():
        raise FileNotFoundError(f"{log_dir} is not a folder. Give a run's folder or one that holds runs.")
    files = [path for path in log_dir.rglob(METRICS) if not _hidden(path.relative_to(log_dir))]
    files.sort(key=lambda path: (_began(path), str(path)))
    if not files:
        raise FileNotFoundError(
            f"No {METRICS} in {log_dir.resolve()} or any folder below it. Give a run's folder (it is written with the "
            "first step) or one that holds runs."
        )
    root = log_dir.resolve()
    runs = []
    for file in files:
        own = file.parent.resolve()
        name = own.name if own == root else own.relative_to(root).as_posix()
        try:
            runs.append(PlottedRun(visible(name, line=True), visible(own.name, line=True), read_figures(file)))
        except (OSError, ValueError) as error:
            say(f"left out: {visible(str(error), line=True)}")
    if not runs:
        raise ValueError(f"No {METRICS} in {log_dir} can be read. Correct or remove the lines that are named above.")
    return runs


def _began(metrics: Path) -> str:
    """Return the time at which a run began, by its log; without one, when its figures were last written."""
    try:
        with opened(metrics.parent / LOG) as log:
            stamp = log.read(19).decode()
        time.strptime(stamp, STAMP)
    except (OSError, ValueError):
        return time.strftime(STAMP, time.localtime(changed(metrics.parent)))
    return stamp


def _hidden(path: Path) -> bool:
    """True if the path is in a hidden folder, such as that of a run that is being replaced."""
    return any(part.startswith(".") for part in path.parts)


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return for each value a weighted mean of about `width` values around it (fewer at the ends): it does not lag."""
    half = max(1, width // 4)
    smoothed = list(values)
    for _ in range(2):  # two box filters make a triangle
        sums = [0.0, *accumulate(smoothed)]
        ends = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
        smoothed = [(sums[end] - sums[begin]) / (end - begin) for begin, end in ends]
    return smoothed


def _panels(plot: str, runs: Sequence[PlottedRun]) -> list[Panel]:
    if plot == "loss":
        return _loss_panels(runs)
    panels = []
    for figure in PLOTS[plot]:
        both = (curve for run in runs for curve in (run.curve(figure.name), run.validation(figure.name)))
        if drawn := [curve for curve in both if curve.steps]:
            panels.append(Panel(figure.title, figure.unit, drawn))
    if plot == "reward" and _same(panels, "reward", "judge reward"):
        panels = [panel for panel in panels if panel.title != "reward"]
    return panels


def _same(panels: Sequence[Panel], first: str, second: str) -> bool:
    """True if two panels show equal figures, as the judge's and the reward's do if the judge is the only reward."""
    curves = {panel.title: panel.curves for panel in panels}
    return first in curves and curves[first] == curves.get(second)


def _loss_panels(runs: Sequence[PlottedRun]) -> list[Panel]:
    """Return a panel for each stage and loss, since losses of different stages have different scales; runs of the same
    stage share panels."""
    panels: dict[tuple[str, str], Panel] = {}
    for run in runs:
        validation = run.validation("loss")
        for figure in PLOTS["loss"]:
            curve = run.curve(figure.name)
            if not curve.steps:
                continue
            unit = _policy_unit(run) if figure.name == "loss/policy" else figure.unit
            panel = panels.setdefault((run.stage, figure.name), Panel(f"{run.stage}: {figure.title}", unit))
            panel.curves.append(curve)
            if validation.steps:  # is shown with the run's first loss
                panel.curves.append(validation)
                validation = PlottedCurve("", [], [])
    return list(panels.values())


def _policy_unit(run: PlottedRun) -> str:
    """Name the unit of the policy's loss, inferred from the run's other figures."""
    if run.curve("margin").steps:  # also for online DPO, which has rewards
        return "nats per pair"
    if run.curve("accuracy").steps:  # KTO: answers judged one by one
        return "loss per answer"
    imitates = run.curve("kl/old").steps and not run.curve("ratio/mean").steps  # best-of-k imitates its own answers
    return "surrogate objective" if run.curve("reward/mean").steps and not imitates else "nats per token"


def _save(panels: Sequence[Panel], path: Path) -> Path:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = 2 if len(panels) == 4 else min(len(panels), 3)
    down = -(-len(panels) // across)
    with rc_context(fname=STYLE):
        most = max(len(panel.curves) for panel in panels)
        width, height = (4.8, 3.6) if most <= len(PALETTE) else (7.2, max(3.6, 0.8 + 0.2 * most))
        figure = Figure(figsize=(max(6.4, width * across), height * down), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        for index, panel in enumerate(panels):
            _fill(figure.add_subplot(down, across, index + 1), panel)
        figure.savefig(path)
    return path


def _fill(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers: dict[str, int] = {}
    for curve in panel.curves:
        label = _plain(curve.label)
        number = numbers.setdefault(curve.label.removesuffix(", validation"), len(numbers))
        colour, line = PALETTE[number % len(PALETTE)], LINES[number // len(PALETTE) % len(LINES)]
        if curve.measured:
            axes.plot(curve.steps, curve.values, "o--", color=colour, markersize=4, linewidth=1, label=label)
        elif len(curve.steps) < 10:
            axes.plot(curve.steps, curve.values, f"o{line}", color=colour, markersize=3, label=label)
        else:
            width = max(3, len(curve.steps) // 15)
            axes.plot(curve.steps, curve.values, color=colour, linewidth=0.7, alpha=0.35)
            axes.plot(curve.steps, smooth(curve.values, width), line, color=colour, linewidth=1.9, label=label)
    axes.set_title(_plain(panel.title))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)
    axes.margins(x=0.02)
    if len(panel.curves) <= len(PALETTE):
        axes.legend(loc="best")
    else:  # outside, so as not to cover the curves
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plain(name: str) -> str:
    """Escape dollar signs, with which matplotlib would begin a formula."""
    return name.replace("$", r"\$")
