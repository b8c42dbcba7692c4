"""Re-make docs/results.md: `python scripts/results.py [--polarity FOLDER] [--seeds 3] [--reuse]`.

Runs the demo, and with FOLDER (rt-polarity.pos and rt-polarity.neg) the same job on real sentences by PPO and by GRPO,
for each seed, and writes the tables. `--reuse` writes them from runs that are there already.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from plaudit.commands.demo import run_demo, run_task

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from rt_polarity import RECIPES, polarity_data  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
TITLES = {
    "demo": "The demo: controlled sentiment, PPO",
    "rt_polarity_ppo": "Real film-review sentences, PPO",
    "rt_polarity_grpo": "Real film-review sentences, GRPO",
}
EXAMPLES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polarity", type=Path, help="folder of rt-polarity.pos and rt-polarity.neg")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0 on")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs go")
    parser.add_argument("--reuse", action="store_true", help="write the page from the runs that are there")
    arguments = parser.parse_args()
    if not arguments.reuse:
        run_demo(arguments.runs / "demo", seeds=range(arguments.seeds))
        for method in ("ppo", "grpo") if arguments.polarity else ():
            make = partial(polarity_data, arguments.polarity)
            output = arguments.runs / f"rt_polarity_{method}"
            run_task(RECIPES / f"{method}.yaml", make, output, seeds=range(arguments.seeds), overrides=())
    tables = "\n".join("\n".join(section(arguments.runs / name, title)) for name, title in TITLES.items())
    head, marker, _ = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    PAGE.write_text(f"{head}{marker}{tables}", encoding="utf-8")
    print(PAGE)


def section(folder: Path, title: str) -> Iterator[str]:
    """A task's table over seeds, and answers of its first seed before and after."""
    path = folder / "seeds.json"
    if not path.exists():
        yield from (f"\n## {title}", "", "Not run.")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    yield from (f"\n## {title}", "", "| | mean | deviation | each seed |", "|---|---:|---:|---|")
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
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    main()
