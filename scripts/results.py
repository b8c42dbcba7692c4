"""Re-make docs/results.md: `python scripts/results.py [--reviews FOLDER] [--seeds 3 4 5] [--only STUDY ...] [--reuse]`.

The studies are those of `studies.py` on the demo's task, with FOLDER `reviews` (reviews.py), and with the package
reasoning-gym `gym` (gym.py), and of episodes (episodes.py), both of seeds of their own. What is finished in the folder
`--runs` is not made again. `--reuse`
runs nothing: it writes the pictures and tables of what there is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import episodes  # noqa: E402
import gym  # noqa: E402
import reviews  # noqa: E402
from lab import SEEDS, kept, measure  # noqa: E402
from pictures import PICTURES, episode_tables, gym_tables, tables  # noqa: E402
from studies import STUDIES, Found  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
KEPT = ROOT / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=Path, help="folder of imdb-train, imdb-test and imdb-unlabelled.jsonl.gz")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of data, weights, order and samples")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs go")
    parser.add_argument(
        "--only", nargs="+", choices=(*STUDIES, "reviews", "gym", "episodes"), help="make only these studies"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--reuse", action="store_true", help="write the page from the runs that are there")
    given = parser.parse_args()
    others = {"reviews": given.reviews, "gym": importlib.util.find_spec("reasoning_gym"), "episodes": True}
    wanted = () if given.reuse else given.only or (*STUDIES, *(study for study, there in others.items() if there))
    if "reviews" in wanted and not given.reviews:
        parser.error("--only reviews needs --reviews FOLDER, with the imdb files")
    seeds, lab, reviewed = given.seeds, given.runs / "studies", given.runs / "reviews"
    for study in (study for study in STUDIES if study in wanted):
        measure(STUDIES[study], lab, seeds, jobs=given.jobs)
    if "reviews" in wanted:
        os.environ[reviews.SOURCE] = str(given.reviews.resolve())
        reviews.measured(reviewed, seeds, jobs=given.jobs)
    if "episodes" in wanted:
        episodes.measure(given.runs / "episodes", jobs=given.jobs)
    if "gym" in wanted:
        gym.measure(given.runs / "gym", jobs=given.jobs)
    for study, variants in STUDIES.items():
        keep(study, kept(variants, lab, seeds))
    keep("reviews", reviews.found(reviewed, seeds))
    keep("gym", gym.found(given.runs / "gym"))
    keep("episodes", episodes.found(given.runs / "episodes"))
    if shown := reviews.side_by_side(reviewed):
        text = json.dumps(shown, indent=1, ensure_ascii=False)
        (KEPT / "reviews_answers.json").write_text(text + "\n", encoding="utf-8")
    write()


def keep(study: str, found: Found) -> None:
    """Write a study's points, a line a variant and seed, if there are any."""
    lines = [
        f'"{name}": {{\n' + ",\n".join(f' "{seed}": {json.dumps(points)}' for seed, points in own.items()) + "\n}"
        for name, own in found.items()
    ]
    if lines:
        (KEPT / f"{study}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    """What a file of the results holds; nothing if it is not there."""
    path = KEPT / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def shown_tables() -> str:
    """The tables of what the files hold."""
    found = {study: read(study) for study in (*STUDIES, "reviews")}
    return "\n".join(
        (*tables(found, read("reviews_answers")), *gym_tables(read("gym")), *episode_tables(read("episodes")))
    )


def write() -> None:
    """Write the pictures, and the tables at the end of the page."""
    for study, draw in PICTURES.items():
        if found := read(study):
            draw(found, KEPT / f"{study}.png")
    head, marker, _ = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    PAGE.write_text(f"{head}{marker}\n{shown_tables().rstrip()}\n", encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
