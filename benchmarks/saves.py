"""How long training waits for a checkpoint: `python benchmarks/saves.py`.

SFT on the demo task with a model of 26 M parameters, so that weights and optimizer state have 300 MB, in one process
and with ranks on Ray; a checkpoint every third step. The wait is that of the run's own events; the step after it shows
what writing takes from training that goes on. `--width` makes the model larger.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plaudit import Run, load_settings, run
from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo

EVERY = 3
LAYERS = 8


def recipe(output: Path, files: DemoFiles, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    width = options.width
    config = {"model_type": "gpt2", "n_embd": width, "n_layer": LAYERS, "n_head": width // 64, "n_positions": 128}
    runtime = {"kind": "ray", "num_training_workers": options.ranks} if kind == "ray" else {}
    return {
        "method": "sft",
        "name": kind,
        "output": str(output),
        "overwrite": True,
        "threads": 1,
        "log": {"quiet": True, "page": False},
        "model": {"config": config, "tokenizer": str(files.tokenizer)},
        "data": {"train": str(files.sft)},
        "optimizer": {"learning_rate": 1e-4},
        "train": {"steps": EVERY * options.saves + 2, "batch_size": options.batch},
        "save": {"every": EVERY, "keep": 1},
        "runtime": runtime,
    }


def measured(found: Run) -> tuple[float, float, float, float]:
    """The bytes of a checkpoint, and medians: the wait for one, a step just after it, another step."""
    events = [json.loads(line) for line in (found.folder / "events.jsonl").read_text().splitlines()]
    waits = [one["end"] - one["begin"] for one in events if one["phase"] == "saves"][:-1] or [0.0]
    steps = [(record["step"], record["time/step"]) for record in found.metrics[EVERY:-1]]
    after = [seconds for step, seconds in steps if step % EVERY == 1]
    others = [seconds for step, seconds in steps if step % EVERY != 1]
    files = list((found.folder / "checkpoints").rglob("*.safetensors"))
    return sum(path.stat().st_size for path in files), *map(statistics.median, (waits, after, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/saves"))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    options = parser.parse_args()
    files = make_demo(options.output / "data", size=DemoSize(pairs=16, pairs_validation=4))
    table = Table("processes", "checkpoint, MB", "wait for one, s", "step after it, s", "other steps, s")
    for kind in options.kinds:
        size, *seconds = measured(run(load_settings(recipe(options.output, files, options, kind))))
        table.add_row(kind, f"{size / 1e6:.0f}", *(f"{one:.2f}" for one in seconds))
    Console().print(table)


if __name__ == "__main__":
    main()
