"""Re-make docs/results.md: `python scripts/results.py [--reviews FOLDER] [--seeds 3] [--only PART ...] [--reuse]`.

Its parts are `demo`; the studies of `studies.py` on the demo's task: `frontier`, `over`, `off_policy`, `samples`; and
with FOLDER `reviews` (reviews.py). What is finished in the folder `--runs` is not made again. `--reuse` runs nothing:
it writes the pictures and tables of what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from plaudit.commands.demo import run_demo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import reviews  # noqa: E402
from lab import Point, kept, measure  # noqa: E402
from pictures import PICTURES, cell, tables  # noqa: E402
from studies import STUDIES, Found  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
KEPT = ROOT / "docs" / "results"
PARTS = ("demo", *STUDIES, "reviews")
DEMO = "The demo: controlled sentiment, PPO"
EXAMPLES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=Path, help="folder of imdb-train, imdb-test and imdb-unlabelled.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0 on")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs go")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="make only these parts")
    parser.add_argument("--jobs", type=int, default=2, help="runs of the studies at a time, one thread each")
    parser.add_argument("--reuse", action="store_true", help="write the page from the runs that are there")
    arguments = parser.parse_args()
    wanted = () if arguments.reuse else arguments.only or PARTS
    if arguments.only and "reviews" in wanted and not arguments.reviews:
        parser.error("--only reviews needs --reviews FOLDER, with the imdb files")
    seeds = range(arguments.seeds)
    if "demo" in wanted and not finished(demo := arguments.runs / "demo", seeds):
        run_demo(demo, seeds=seeds)
    for study in (study for study in STUDIES if study in wanted):
        measure(STUDIES[study], arguments.runs / "studies", seeds, jobs=arguments.jobs)
    reviews_at = arguments.runs / "reviews"
    if "reviews" in wanted and arguments.reviews:
        os.environ[reviews.SOURCE] = str(arguments.reviews.resolve())
        reviews.measured(reviews_at, seeds, jobs=arguments.jobs)
    if points := reviews.found(reviews_at, seeds):
        keep(KEPT / "reviews.json", points)
        shown = json.dumps(reviews.side_by_side(reviews_at), indent=1, ensure_ascii=False)
        (KEPT / "reviews_answers.json").write_text(shown + "\n", encoding="utf-8")
    for study, variants in STUDIES.items():
        if found := kept(variants, arguments.runs / "studies", seeds):
            keep(KEPT / f"{study}.json", found)
    write(arguments.runs)


def finished(task: Path, seeds: range) -> bool:
    """True if a task has its table over these seeds."""
    table = task / "seeds.json"
    return table.exists() and json.loads(table.read_text(encoding="utf-8"))["seeds"] == list(seeds)


def keep(path: Path, found: Found) -> None:
    """Write a study's points, a line a variant and seed."""
    path.parent.mkdir(exist_ok=True)
    lines = [
        f'"{name}": {{\n' + ",\n".join(f' "{seed}": {json.dumps(points)}' for seed, points in own.items()) + "\n}"
        for name, own in found.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def points_of(study: str) -> dict[str, dict[str, list[Point]]]:
    """Return a study's points, none if it was never run."""
    path = KEPT / f"{study}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def shown_tables() -> str:
    """The tables of what the files hold."""
    answers = KEPT / "reviews_answers.json"
    shown = json.loads(answers.read_text(encoding="utf-8")) if answers.exists() else {}
    return "\n".join(tables({study: points_of(study) for study in PICTURES | STUDIES}, shown))


def write(runs: Path) -> None:
    """Write pictures and the page's tables. The demo keeps its table if its runs are not there."""
    for study, draw in PICTURES.items():
        if found := points_of(study):
            draw(found, KEPT / f"{study}.png")
    head, marker, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    demo = rest[rest.index(f"## {DEMO}") :]
    if (runs / "demo" / "seeds.json").exists():
        demo = "\n".join([f"## {DEMO}", *section(runs / "demo")])
    PAGE.write_text(f"{head}{marker}\n{shown_tables()}\n{demo.rstrip()}\n", encoding="utf-8")
    print(PAGE)


def section(folder: Path) -> Iterator[str]:
    """A task's table over seeds, and answers of its first seed before and after."""
    found = json.loads((folder / "seeds.json").read_text(encoding="utf-8"))
    yield from ("", "| | mean | deviation | each seed |", "|---|---:|---:|---|")
    for label, figure in found["figures"].items():
        each = ", ".join(f"{value:.3f}" for value in figure["values"])
        deviation = f"{figure['deviation']:.3f}" if len(figure["values"]) > 1 else "-"
        yield f"| {label} | {figure['mean']:.3f} | {deviation} | {each} |"
    first = folder / f"seed{found['seeds'][0]}" / "comparison.jsonl"
    rows = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    yield from ("", f"Answers of seed {found['seeds'][0]}, every {len(rows) // EXAMPLES}th test prompt:", "")
    yield from ("| prompt | before (gold) | after (gold) |", "|---|---|---|")
    for row in rows[:: len(rows) // EXAMPLES][:EXAMPLES]:
        answers = (row["before"], row["after"])
        cells = [row["prompt"], *(f"{a['completion'].strip()} ({a['rewards']['gold']:+.2f})" for a in answers)]
        yield f"| {' | '.join(map(cell, cells))} |"


if __name__ == "__main__":
    main()
