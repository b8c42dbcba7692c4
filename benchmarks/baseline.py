"""Tokens per second of Assent beside TRL and transformers: same weights, data, tokens, threads and precision, one run.

    plan -> workload (data, weights) -> for each line: a contest of two processes -> table, result.json, table.md

Contenders run in environments of their own (`setup_peers.sh` makes the peers'); what is measured and how tokens are
counted is written in docs/benchmarks.md. Left out: GPUs and precisions below float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contest import Contender, Entry, Result, contest
from plan import MODELS, Plan
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "67108864"}
"""glibc keeps freed blocks instead of handing them back to the kernel at once: worth 1.2x and more to both sides."""


@dataclass(frozen=True)
class Line:
    """A row of the table: what our process runs, what the peer's does, and which peer that is."""

    title: str
    ours: str
    theirs: str
    peer: str = "trl"
    in_quick: bool = True


LINES = {
    "sft": Line("SFT", "sft", "sft"),
    "sft-sorted": Line("SFT, peer's rows sorted by length", "sft", "sft-sorted", in_quick=False),
    "reward": Line("reward model", "reward", "reward"),
    "dpo": Line("DPO", "dpo", "dpo"),
    "ppo": Line("PPO, 4 epochs", "ppo", "ppo", peer="trl-ppo"),
    "grpo": Line("GRPO, k=4, KL", "grpo", "grpo"),
    "generation": Line("generation, sampled", "generation", "generation", peer="transformers"),
    "generation-greedy": Line(
        "generation, greedy, 48 tokens", "generation-greedy", "generation-greedy", "transformers", in_quick=False
    ),
}
DEADLINE = 300.0
"""Seconds that a contender may be silent; a segment takes a few on a free machine."""
SCRIPTS = {"trl": "contender_trl.py", "transformers": "contender_trl.py", "trl-ppo": "contender_trl_ppo.py"}


@dataclass(frozen=True)
class Row:
    """A line and its two outcomes."""

    line: Line
    ours: Result | str
    theirs: Result | str


def main() -> None:
    options = read_options()
    folder = ROOT / "runs" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    size = "quick" if options.quick else "full"
    plan = Plan(
        folder=str(ROOT / "runs" / f"bench-workload-{options.model}-{size}"),
        output=str(folder / "output"),
        model=options.model,
        threads=options.threads,
        repeats=options.repeats or (2 if options.quick else 3),
        step_scale=0.25 if options.quick else 1.0,
        warm_start_steps=40 if options.quick else 80,
    )
    Path(plan.output).mkdir(parents=True)
    plan.write(folder / "plan.json")
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 140)
    environment = child_environment(options, plan)
    began = time.perf_counter()
    prepare(plan, folder, environment, console)
    names = options.lines or [name for name, line in LINES.items() if line.in_quick or not options.quick]
    rows = []
    for name in names:
        line = LINES[name]
        console.print(f"[{time.perf_counter() - began:5.0f} s] {line.title}", markup=False)
        entries = [ours(line, folder, environment), theirs(line, folder, environment, options)]
        steps = plan.steps(line.ours)
        rows.append(Row(line, *contest(entries, steps=steps, repeats=plan.repeats, hurry=options.quick)))
    for table in (speed_table(rows, plan), check_table(rows)):
        console.print(table)
    for failure in failures(rows):
        console.print(failure, markup=False)
    note = f"{machine(plan, options)}; {time.perf_counter() - began:.0f} s in all"
    console.print(note, markup=False)
    record(folder, rows, plan, note)
    shutil.rmtree(plan.output)
    console.print(f"written to {folder}", markup=False)
    if any(isinstance(row.ours, str) for row in rows):
        sys.exit(1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, both sides started at once, fewer lines")
    parser.add_argument("--lines", nargs="+", choices=LINES, metavar="LINE", help=f"some of: {', '.join(LINES)}")
    parser.add_argument("--model", choices=MODELS, default="gpt2-4m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="measured segments of each side; 3, or 2 with --quick")
    parser.add_argument("--malloc", choices=("kept", "default"), default="kept", help="glibc's memory, for both sides")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--ppo-python", type=Path, default=ROOT / ".venv-trl112/bin/python")
    options = parser.parse_args()
    for name in ("threads", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: give 1 or more")
    return options


def child_environment(options: argparse.Namespace, plan: Plan) -> dict[str, str]:
    """The same for both sides: threads, memory, no network, no progress bars."""
    threads = str(plan.threads)
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    cache = {"HF_HOME": f"{plan.output}/hub", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    malloc = MALLOC if options.malloc == "kept" else {}
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **quiet, **cache, **malloc}


def prepare(plan: Plan, folder: Path, environment: dict[str, str], console: Console) -> None:
    """Data and weights, made by our own environment; those of an earlier run of the same size are used again."""
    if plan.ready:
        console.print(f"data and weights of an earlier run: {plan.folder}", markup=False)
        return
    console.print("making data and weights, once", markup=False)
    shutil.rmtree(plan.folder, ignore_errors=True)
    with (folder / "workload.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(HERE / "workload.py"), str(folder / "plan.json")],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT / "src")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        sys.exit(f"the workload could not be made; see {folder / 'workload.log'}")


def ours(line: Line, folder: Path, environment: dict[str, str]) -> Entry:
    command = [sys.executable, str(HERE / "contender_assent.py"), str(folder / "plan.json"), line.ours]
    ours_only = {**environment, "PYTHONPATH": str(ROOT / "src")}
    return partial(
        Contender, command, environment=ours_only, log=folder / f"{line.theirs}-assent.log", deadline=DEADLINE
    )


def theirs(line: Line, folder: Path, environment: dict[str, str], options: argparse.Namespace) -> Entry:
    python: Path = options.ppo_python if line.peer == "trl-ppo" else options.peer_python
    if not python.exists():
        return "not installed: run benchmarks/setup_peers.sh"
    command = [str(python), str(HERE / SCRIPTS[line.peer]), str(folder / "plan.json"), line.theirs]
    peer_only = {**environment, "PYTHONPATH": ""}
    return partial(Contender, command, environment=peer_only, log=folder / f"{line.theirs}-peer.log", deadline=DEADLINE)


# --- what is shown


def speed_table(rows: Sequence[Row], plan: Plan) -> Table:
    titles = ("line", "ours tok/s", "peer tok/s", "ratio (range)", "CPU-s/1k tok", "first step, s", "peak MiB", "peer")
    table = Table(title=f"{plan.model}, {plan.threads} threads, float32: ours / peer's", title_justify="left")
    for title in (*titles[:1], "threads", "precision", *titles[1:]):
        table.add_column(title, justify="left" if title in ("line", "peer") else "right")
    for row in rows:
        table.add_row(row.line.title, str(plan.threads), "float32", *speeds(row))
    return table


def speeds(row: Row) -> tuple[str, ...]:
    """Cells of a row of the first table, behind line, threads and precision."""
    a, b = row.ours, row.theirs
    return (
        shown(a, lambda r: f"{r.rate:,.0f}"),
        shown(b, lambda r: f"{r.rate:,.0f}"),
        ratio(a, b),
        both(a, b, lambda r: f"{r.cost:.2f}"),
        both(a, b, lambda r: f"{r.first_step:.1f}"),
        both(a, b, lambda r: f"{r.peak_mib:,.0f}"),
        peer_name(row),
    )


def check_table(rows: Sequence[Row]) -> Table:
    """Figures that must be near each other if both sides did the same work."""
    table = Table(title="the same work? ours / peer's", title_justify="left")
    for title in ("line", "tokens a step", "loss", "reward", "tokens an answer", "same greedy tokens"):
        table.add_column(title, justify="left" if title == "line" else "right")
    for row in rows:
        table.add_row(row.line.title, *checks(row))
    return table


def checks(row: Row) -> tuple[str, ...]:
    """Cells of a row of the second table, behind the line."""
    a, b = row.ours, row.theirs
    forms = {"loss": "{:.4f}", "reward": "{:.3f}", "length": "{:.1f}"}
    figures = [both(a, b, partial(figure, name=name, form=form)) for name, form in forms.items()]
    return (both(a, b, lambda r: f"{r.tokens_per_step:,.0f}"), *figures, same_tokens(a, b))


def figure(result: Result, *, name: str, form: str) -> str:
    return form.format(result.figures[name]) if name in result.figures else ""


def shown(result: Result | str, form: Callable[[Result], str]) -> str:
    return "-" if isinstance(result, str) else form(result)


def both(a: Result | str, b: Result | str, form: Callable[[Result], str]) -> str:
    cells = [shown(result, form) for result in (a, b)]
    return " / ".join(cells) if any(cell not in ("", "-") for cell in cells) else ""


def ratio(a: Result | str, b: Result | str) -> str:
    """Of the medians; in brackets the smallest and largest of neighbouring segments."""
    if isinstance(a, str) or isinstance(b, str):
        return ""
    pairs = [x / y for x, y in zip(a.rates, b.rates, strict=True)]
    return f"{a.rate / b.rate:.2f} ({min(pairs):.2f}-{max(pairs):.2f})"


def same_tokens(a: Result | str, b: Result | str) -> str:
    if isinstance(a, str) or isinstance(b, str) or not a.tokens or not b.tokens:
        return ""
    equal = [x == y for ours, theirs in zip(a.tokens, b.tokens, strict=True) for x, y in zip(ours, theirs, strict=True)]
    return f"{statistics.fmean(equal):.1%}"


def peer_name(row: Row) -> str:
    package = "transformers" if row.line.peer == "transformers" else "trl"
    return package if isinstance(row.theirs, str) else f"{package} {row.theirs.versions[package]}"


def failures(rows: Sequence[Row]) -> list[str]:
    """Why cells are empty."""
    return [
        f"{row.line.title}, {side}: {result}"
        for row in rows
        for side, result in (("ours", row.ours), (row.line.peer, row.theirs))
        if isinstance(result, str)
    ]


def machine(plan: Plan, options: argparse.Namespace) -> str:
    """The line under the tables."""
    from importlib.metadata import version

    words = [line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{words[0] if words else platform.processor()}, {cores} cores; load {os.getloadavg()[0]:.1f} at the end; "
        f"{plan.threads} threads, float32, glibc memory {options.malloc}; torch {version('torch')}, "
        f"transformers {version('transformers')}; medians of {plan.repeats} after a warm-up, "
        "segments of both sides in turn"
    )


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def record(folder: Path, rows: Sequence[Row], plan: Plan, note: str) -> None:
    """result.json with every segment, and table.md for the docs."""
    content = {
        row.line.theirs: {
            side: result if isinstance(result, str) else dataclasses.asdict(result) | {"tokens": len(result.tokens)}
            for side, result in (("ours", row.ours), ("theirs", row.theirs))
        }
        for row in rows
    }
    result = {"plan": dataclasses.asdict(plan), "note": note, "lines": content}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    parts = [markdown(table) for table in (speed_table(rows, plan), check_table(rows))]
    (folder / "table.md").write_text("\n".join([*parts, note, ""]))


def markdown(table: Table) -> str:
    """A rich table as Markdown."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
    rule = "|" + "|".join("---" if column.justify == "left" else "---:" for column in table.columns) + "|"
    return "\n".join([lines[0], rule, *lines[1:], ""])


if __name__ == "__main__":
    main()
