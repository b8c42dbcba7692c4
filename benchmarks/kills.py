"""Kills processes of runs at random moments, and sees whether each run ends as if nothing had happened.

    --kills, --seed -> rounds: a GRPO run on Ray, whose ranks and rollout workers are killed or frozen -> table

Each round's weights are compared with those of an undisturbed run of the same length, bit for bit. Exits with 1 where
they differ, or where a kill was not survived. The model is tiny: what is shown is recovery, not training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults import HEADER, Kill, Killer, seeded
from safetensors.torch import load_file

from assent import Run, load_settings, run
from assent.data.demo import DemoFiles, DemoSize, make_demo

ROUND = 20
"""Kills of one run."""
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as folder:
        size = DemoSize(sft=24, sft_validation=4, pairs=16, pairs_validation=4, prompts=24, prompts_test=4)
        demo = make_demo(Path(folder) / "demo", size=size)
        print(HEADER, flush=True)
        kills: list[Kill] = []
        while len(kills) < options.kills:
            number = len(kills) // ROUND
            mine = seeded(options.seed * 1000 + number, min(ROUND, options.kills - len(kills)))
            survive(mine, demo, Path(folder) / str(number), ranks=options.ranks, workers=options.workers)
            print("\n".join(kill.row() for kill in mine), flush=True)
            kills += mine
    print(summary(kills))
    sys.exit(0 if all(kill.equal for kill in kills) else 1)


def recipe(demo: DemoFiles, output: Path, steps: int) -> dict[str, Any]:
    """A run of so many short steps, with a checkpoint after every other one."""
    return {
        "method": "grpo",
        "name": "run",
        "output": str(output),
        "threads": 1,
        "model": {"config": dict(GPT2), "tokenizer": str(demo.tokenizer)},
        "data": {"train": str(demo.prompts), "max_prompt_tokens": 40},
        "optimizer": {"learning_rate": 0.003},
        "rollout": {"prompts_per_step": 3, "max_tokens": 10, "slots": 8},
        "rewards": [{"kind": "function", "function": f"{Path(__file__).resolve().with_name('faults.py')}:varied"}],
        "train": {"steps": steps},
        "save": {"steps": 2},
        "log": {"quiet": True},
    }


def survive(kills: list[Kill], demo: DemoFiles, output: Path, *, ranks: int = 1, workers: int = 2) -> tuple[Run, Run]:
    """An undisturbed run and one that is killed; notes in each kill whether both ended alike. The undisturbed one is
    local unless there are several ranks, which sum gradients in another order than one."""
    steps = 2 * len(kills) + 4
    ray = {"runtime": runtime(ranks)}
    whole = run(load_settings(recipe(demo, output / "whole", steps) | (ray if ranks > 1 else {})))
    disturbed = recipe(demo, output / "killed", steps) | ray
    disturbed["rollout"] = disturbed["rollout"] | {"workers": workers}
    killer = Killer(kills)
    with killer.at_work():
        done = run(load_settings(disturbed), hooks=[killer.hook])
    equal = same_weights(whole, done) and rewards(whole) == rewards(done)
    for kill in kills:
        kill.equal = equal and kill.found is not None and kill.next_step is not None
    return whole, done


def runtime(ranks: int) -> dict[str, Any]:
    return {
        "kind": "ray",
        "num_training_workers": ranks,
        "object_store_mb": 100,
        "heartbeat_timeout": 5.0,
        "max_failures": -1,
    }


def same_weights(a: Run, b: Run) -> bool:
    first, second = (load_file(found.model / "model.safetensors") for found in (a, b))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def rewards(done: Run) -> list[tuple[float, float]]:
    return [(record["step"], record["reward/mean"]) for record in done.metrics]


def summary(kills: list[Kill]) -> str:
    lines = [f"{len(kills)} kills, {sum(not kill.equal for kill in kills)} mismatches ({time.strftime('%Y-%m-%d')})"]
    for role in sorted({kill.role for kill in kills}):
        for name in ("found", "next_step"):
            values = [getattr(k, name) for k in kills if k.role == role and getattr(k, name) is not None]
            if values:
                text = f"{role}, {name.replace('_', ' ')}: median {statistics.median(values):.1f} s"
                lines.append(f"{text}, longest {max(values):.1f} s")
    return "\n".join(lines)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="training ranks")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
