"""What all benchmarks share: options, processes that report JSON, memory, tables, and results with machine and date.

    options -> processes, the last line of each is JSON -> a table in Markdown -> --json FILE: rows, machine and date

Standard library only: contenders in the peers' environments import it too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PLAUDIT = [sys.executable, "-m", "plaudit.commands.cli"]
SOURCE = {"PYTHONPATH": str(ROOT / "src")}
"""Environment of processes that run ours."""
KEPT = Path(), "a JSON file for the rows, with machine and date"


def asked(about: str | None, given: Sequence[str] | None = None, **flags: Any) -> argparse.Namespace:
    """Read the command line, `given` or the process's own, by flags and their defaults.

    A default is a value, or a value and a line of help. False makes a switch. A list takes several values of its
    entries' type, of strings only those that it has. A type makes a required word without a dash. `json=KEPT` names the
    file in which `show` keeps its rows.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in flags.items():
        default, help_text = value if isinstance(value, tuple) else (value, None)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, type):
            parser.add_argument(name, type=default, help=help_text)
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=help_text)
        elif isinstance(default, list):
            choices = default if isinstance(default[0], str) else None
            kind = type(default[0])
            parser.add_argument(flag, type=kind, nargs="+", default=default, choices=choices, help=help_text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=help_text)
    return parser.parse_args(given)


def table(titles: Sequence[str], rows: Iterable[Iterable[Any]], *, left: Container[str] = ()) -> str:
    """Markdown. The first column and those in `left` are at the left, the others at the right."""
    rule = "|".join("---" if title in left or title == titles[0] else "---:" for title in titles)
    told = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return "\n".join([told[0], f"|{rule}|", *told[1:]])


def show(rows: Iterable[Mapping[str, Any]], *, title: str = "", kept: Path | None = None) -> list[Mapping[str, Any]]:
    """Print rows of one shape as a table, each as soon as it is found; keep them in a JSON file if `kept` names one."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        text = table([*row], [row.values()])
        print(text.rpartition("\n")[2] if found else title + "\n\n" * bool(title) + text, flush=True)
        found.append(row)
        if kept is not None and kept.name:
            keep(kept, {"about": about(), "title": title, "rows": found})
    return found


def keep(path: Path, found: Any) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def about() -> str:
    """Date, processor, cores and load."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{time.strftime('%Y-%m-%d')}, {processor()}, {cores} cores, load {load:.1f}"


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in (*packages, "torch", "transformers")}


def in_ranks(world: int, *words: str) -> list[Any]:
    """Start this script in `world` processes, each with the words and `--rank N`; return what their last lines say.

    Raises SystemExit if one failed, which has printed why.
    """
    command = [sys.executable, sys.argv[0], *words, "--rank"]
    running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(world)]
    said = [process.communicate(timeout=600)[0] for process in running]
    if failed := [process.returncode for process in running if process.returncode]:
        raise SystemExit(f"{' '.join(words)}: a rank ended with status {failed[0]}")
    return [json.loads(one.splitlines()[-1]) for one in said]


def resident(field: str) -> float:
    """MiB by this process's own account: VmRSS now, VmHWM at most since `forget_peak`, RssAnon without files' pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
