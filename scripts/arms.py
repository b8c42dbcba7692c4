"""Arms of a study that go on from each other: a process each, in order, and nothing that was measured is run again.

task, seed -> its arms, one after the other -> a file of figures each -> {task/arm: {seed: figures}}
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Arms = Mapping[str, Sequence[str]]
"""The arms of each task, in order."""


def place_of(lab: Path, task: str, arm: str, seed: int) -> Path:
    """The file of an arm's figures."""
    return lab / f"{task}_{arm}_{seed}.json"


def once(path: Path, about: Record, figures_of: Callable[[], Record]) -> Record:
    """Return an arm's figures from its file if that is of the same `about`; otherwise make them and keep them there."""
    about = json.loads(json.dumps(about))
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if record.get("about") != about:
        text = json.dumps({"about": about, "figures": figures_of()})
        path.with_suffix(".part").write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
        record = json.loads(text)
    return dict(record["figures"])


def measure(measured: Callable[..., Record], arms: Arms, seeds: Sequence[int], lab: Path, *, jobs: int) -> None:
    """Call `measured(task, arm, seed, lab)` for every arm: `jobs` tasks and seeds at a time, each arm in a process."""
    lab.mkdir(parents=True, exist_ok=True)

    def in_order(task: str, seed: int) -> None:
        for arm in arms[task]:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                figures = process.submit(measured, task, arm, seed, lab.resolve()).result()
            print(f"{task}, seed {seed}, {arm}: {json.dumps(figures | {'texts': None})}", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        asked = [threads.submit(in_order, task, seed) for seed, task in product(seeds, arms)]
    for done in asked:
        done.result()


def found(arms: Arms, seeds: Sequence[int], lab: Path) -> dict[str, dict[str, Record]]:
    """Return figures by task and arm, then seed, as far as they were measured."""
    kept: dict[str, dict[str, Record]] = {}
    for task, seed in product(arms, seeds):
        for arm in arms[task]:
            if (path := place_of(lab, task, arm, seed)).exists():
                figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
                kept.setdefault(f"{task}/{arm}", {})[str(seed)] = figures
    return kept


def command(about: str | None, folder: str, measure: Callable[..., None]) -> None:
    """The command line of a study."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=f"where the runs go, in its folder {folder}")
    parser.add_argument("--jobs", type=int, default=2, help="tasks at a time, one thread each")
    given = parser.parse_args()
    measure(given.runs / folder, jobs=given.jobs)
