"""The whole job on real film-review sentences: `python scripts/rt_polarity.py FOLDER [--method grpo] [--seeds 3]`.

FOLDER holds rt-polarity.pos and rt-polarity.neg (Pang and Lee's sentence polarity dataset v1.0). A half of the
sentences trains the gold classifier and is seen by nothing else; needs scikit-learn (pip install -e '.[examples]').
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from plaudit.commands.cli import plain_errors
from plaudit.commands.demo import run_task
from plaudit.monitor.console import Reporter
from plaudit.tasks.polarity import make_polarity

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "rt_polarity"


def polarity_data(source: Path, folder: Path, seed: int, reporter: Reporter) -> None:
    """Write the task's files, and say how good its gold classifier is."""
    files = make_polarity(source, folder, seed=seed)
    reporter.say(
        f"the task, in {folder}: the gold classifier, trained on the other half of the sentences, tells positive from "
        f"negative ones on {files.gold_accuracy:.1%} of this half"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of rt-polarity.pos and rt-polarity.neg")
    parser.add_argument("--method", choices=sorted(path.stem for path in RECIPES.glob("*.yaml")), default="ppo")
    parser.add_argument("--output", type=Path, help="default: runs/rt_polarity_METHOD")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0 on")
    parser.add_argument("overrides", nargs="*", help="STAGE.key=value")
    arguments = parser.parse_intermixed_args()  # overrides may stand behind the flags, too
    output = arguments.output or Path("runs") / f"rt_polarity_{arguments.method}"
    with plain_errors(output):
        run_task(
            RECIPES / f"{arguments.method}.yaml",
            partial(polarity_data, arguments.source),
            output,
            seeds=range(arguments.seeds),
            overrides=arguments.overrides,
        )


if __name__ == "__main__":
    main()
