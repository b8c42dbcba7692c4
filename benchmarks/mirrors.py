"""What copies of ranks' states cost a step, and how soon a run goes on after a lost rank. Prints a table.

    python benchmarks/mirrors.py [--steps 40] [CASE ...]

The float32 Llama of `task.py` with 25 million weights learns on two ranks of one thread each, on one machine. Steps
with copies and without take turns in one run, five of each, so that whatever else the machine does meets both. The
first of five is left out, as it shares the machine with what was sent before. Then a rank is killed within a step.

step: median seconds from one step's end to the next one's. held: of these, the wait for the copy in the ranks' memory,
and for the step before to have arrived. back: from the last new process being up to the end of the next step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from faults import Kill, Killer
from kills import CLUSTER
from task import MODELS

from plaudit import load_settings, run
from plaudit.executors.mirrors import Mirrors
from plaudit.loop.progress import Moment, Remembered
from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo
from plaudit.types import Stats

CASES: dict[str, dict[str, Any]] = {
    "replicate": {"num_training_workers": 2},
    "fsdp": {"num_training_workers": 2, "strategy": "fsdp"},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline": {"mesh": {"pipeline": 2}},
}
TURN, FURTHER = 5, 4
SIZE = DemoSize(sft=400, sft_validation=4, pairs=4, pairs_validation=4, prompts=4, prompts_test=4, vocabulary=400)


class Turns(Killer):
    """Mirrors the steps of every other turn."""

    def __init__(self, steps: int):
        super().__init__([Kill("rank", "update", steps)])
        self.measured, self.took, self.ended = steps, dict[int, float](), dict[int, float]()

    def mirrored(self, step: int) -> bool:
        return step >= self.measured or step // TURN % 2 == 0

    async def hook(self, moment: Moment) -> Stats:
        found = await super().hook(moment)
        self.ended.setdefault(moment.progress.step, time.perf_counter())
        return found

    def seconds(self, mirrored: bool) -> float:
        """Of a step, whose end is before the copy of its own state: that is the next one's."""
        counted = [step for step in range(TURN, self.measured - 1) if step % TURN and self.mirrored(step) == mirrored]
        return median(self.ended[step + 1] - self.ended[step] for step in counted)


def measured(case: str, demo: DemoFiles, folder: Path, steps: int) -> list[str]:
    turns, take = Turns(steps), Mirrors.take

    async def timed(mirrors: Mirrors, remembered: Remembered) -> None:
        step = remembered.progress.step
        if turns.mirrored(step):
            begun = time.perf_counter()
            await take(mirrors, remembered)
            turns.took[step] = time.perf_counter() - begun

    mesh = {**CASES[case].get("mesh", {}), "mirrors": 1}
    recipe = {
        "method": "sft",
        "name": case,
        "output": str(folder),
        "threads": 1,
        "model": {"config": MODELS["25M"], "tokenizer": str(demo.tokenizer)},
        "data": {"train": str(demo.sft)},
        "train": {"steps": steps + FURTHER, "batch_size": 16},
        "save": {"every": None},
        "log": {"quiet": True},
        "runtime": {**CLUSTER, **CASES[case], "mesh": mesh},
    }
    Mirrors.take = timed  # type: ignore[method-assign]
    try:
        with turns.at_work():
            run(load_settings(recipe), hooks=[turns.hook])
    finally:
        Mirrors.take = take  # type: ignore[method-assign]
    (kill,) = turns.kills
    on, off = turns.seconds(True), turns.seconds(False)
    held = median(seconds for step, seconds in turns.took.items() if step % TURN)
    again = f"{kill.back:.1f} | {kill.repeated}" if kill.back is not None else "-"
    return [case, f"{off:.2f}", f"{on:.2f}", f"{on / off - 1:+.0%}", f"{held:.2f}", again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args()
    print("| two ranks | step without | step with | more | held | back | steps again |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        demo = make_demo(Path(folder) / "demo", size=SIZE)
        for case in options.cases or CASES:
            print(f"| {' | '.join(measured(case, demo, Path(folder), options.steps))} |", flush=True)


if __name__ == "__main__":
    main()
