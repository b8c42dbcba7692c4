"""PPO in six placements: the same weights, and what each costs: `python benchmarks/placements.py runs/placements`.

Four steps of the demo's data with a judge that knows nothing, one thread a process. A step is the median of the runs'
own figures without the first; memory is the sum of what all processes took at most. Weights are compared with those of
the first row after the last step, in the policy and in the critic.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from plans import RAY, TURNS, prepared, run
from safetensors.torch import load_file
from torch import Tensor

# With a small epsilon AdamW would make steps of the rate's size from differences of 1e-9 where gradients vanish.
COMMON = [*RAY, "optimizer.eps=1e-3", "rollout.slots=16", "save.every=4 steps"]
CASES: Sequence[tuple[str, list[str]]] = (
    ("one rank, one rollout worker", []),
    ("the reference on two ranks", ["runtime.placement={reference: {workers: 2}}"]),
    ("the critic on two ranks", ["runtime.placement={critic: {workers: 2}}"]),
    (
        "critic and reference on tensor 2",
        ["runtime.placement={critic: {mesh: {tensor: 2}}, reference: {inside: critic}}"],
    ),
    ("rank and rollout worker in turn", [TURNS]),
    (
        "four ranks, tensor 2, sample at data 4",
        [
            "runtime.placement={generate: {inside: train}}",
            "runtime.num_training_workers=2",
            "runtime.mesh={tensor: 2}",
        ],
    ),
)


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint's policy and critic."""
    found: dict[str, Tensor] = {}
    for role in ("policy", "critic"):
        newest = max((folder / "run-ppo" / "checkpoints" / role).glob("*"), key=lambda path: path.stat().st_mtime)
        for file in newest.glob("model*.safetensors"):
            found |= {f"{role}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    prepared(folder)
    print("| placement | seconds a step | MB, all processes | largest difference of a weight |\n|---|---:|---:|---:|")
    first: dict[str, Tensor] = {}
    for name, words in CASES:
        seconds, memory = run(folder, "ppo", [*COMMON, *words])
        own = weights(folder)
        first = first or own
        gap = max(float((own[key] - first[key]).abs().max()) for key in first)
        same = all(torch.equal(own[key], first[key]) for key in first)
        told = "-" if own is first else "none" if same else f"{gap:.1e}"
        print(f"| {name} | {seconds:.2f} | {memory / 1e6:,.0f} | {told} |", flush=True)


if __name__ == "__main__":
    main()
