"""Plans beside what runs take: `python benchmarks/plans.py runs/plans` makes real runs of 22 plans.

A case is a run of four steps in processes of its own; its step is the median without the first. Its memory is the sum
of what all of its processes took at most. Plans are made from one profile of each method.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from harness import KEPT, PLAUDIT, asked, show

from plaudit.runtime.memory import peaks

STEPS = 4
FRESH = "{model_type: gpt2, n_embd: %d, n_layer: %d, n_head: 4, n_positions: 256}"
POLICY, JUDGE = FRESH % (192, 4), FRESH % (256, 6)
COMMON = [
    "model.tokenizer=data/tokenizer",
    f"model.config={POLICY}",
    f"train.steps={STEPS}",
    "save.every=1000 steps",
    "output=.",
]
SAMPLED = ["data.train=data/prompts.jsonl", "data.max_prompt_tokens=64", "rewards=[{kind: judge, path: judge}]"]
METHODS = {
    "ppo": [*SAMPLED, "rollout.max_tokens=64", "rollout.prompts_per_step=64", "algorithm.minibatches=2"],
    "grpo": [*SAMPLED, "rollout.max_tokens=64", "rollout.prompts_per_step=8", "algorithm.samples=8"],
    "sft": ["data.train=data/sft.jsonl", "data.max_tokens=128", "data.max_prompt_tokens=64", "train.batch_size=512"],
}
RAY = ["runtime=ray", "threads=1"]
TURNS = "runtime.placement={generate: {shares: train}}"
SHARED = [*RAY, "runtime.num_training_workers=2", "rollout.workers=2", TURNS]
CASES: Sequence[tuple[str, list[str]]] = (
    ("one process, two threads", ["threads=2"]),
    ("one process, one thread", ["threads=1"]),
    ("one process, 16 slots", ["threads=2", "rollout.slots=16"]),
    ("a rank and a rollout worker", RAY),
    ("the same, one step ahead", [*RAY, "rollout.max_lag=1"]),
    ("two ranks, shared with two workers", SHARED),
    ("the same, sharded", [*SHARED, "runtime.strategy=fsdp"]),
)
STAGES = "runtime.mesh={pipeline: 2}"
STAGED: Sequence[tuple[str, list[str]]] = (
    ("two stages, passes of 2,048 tokens", [*RAY, STAGES, "learn.micro_tokens=2048"]),
    ("two stages, passes of 1,024", [*RAY, STAGES, "learn.micro_tokens=1024"]),
    ("two stages, passes of 512", [*RAY, STAGES, "learn.micro_tokens=512"]),
)
SPANS: Sequence[tuple[str, list[str]]] = (
    (
        "two stages of two spans, passes of 512",
        [*RAY, "runtime.mesh={pipeline: 2, spans: 2}", "learn.micro_tokens=512"],
    ),
)
OF = {"ppo": [*CASES, *STAGED[1:]], "grpo": [*CASES, *STAGED[1:]], "sft": [*STAGED, *SPANS]}


def called(folder: Path, *words: str) -> str:
    done = subprocess.run([*PLAUDIT, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def prepared(folder: Path) -> None:
    """The demo's data, and a judge that is larger than the policy and knows nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        called(folder, "demo", "--data-only", "data")
    if not (folder / "judge").exists():
        sizes = ["data.max_tokens=128", "data.max_prompt_tokens=64", "train.steps=1", "train.batch_size=4"]
        given = ["model.tokenizer=data/tokenizer", f"model.config={JUDGE}", "data.train=data/preferences.jsonl"]
        called(folder, "reward", *given, *sizes, "output=.", "name=judge")


def run(folder: Path, method: str, words: Sequence[str]) -> tuple[float, float]:
    """Seconds of a step, and MiB of all processes."""
    given = [*COMMON, *METHODS[method], *words, f"name=run-{method}", "overwrite=true", "log.quiet=true"]
    log = (folder / "run.log").open("w")
    most: dict[int, float] = {}
    with subprocess.Popen([*PLAUDIT, method, *given], cwd=folder, stdout=log, stderr=log) as process:
        while process.poll() is None:
            for name, size in peaks(process.pid).items():
                most[name] = max(size, most.get(name, 0.0))
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit((folder / "run.log").read_text()[-2000:])
    lines = (folder / f"run-{method}" / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(line)["time/step"] for line in lines[1:]), sum(most.values()) / 2**20


def planned(folder: Path, method: str, words: Sequence[str]) -> tuple[float, float]:
    """What `plaudit plan` says of both."""
    given = [*COMMON, *METHODS[method], *words, f"name={method}"]
    told = json.loads(called(folder, "plan", method, *given, "--json"))["plans"]["now"]
    set_by = dict(word.partition("=")[::2] for word in words)
    counts = {"rank": set_by.get("runtime.num_training_workers", 1), "rollout worker": set_by.get("rollout.workers", 1)}
    size = sum(sum(parts.values()) * int(counts.get(name, 1)) for name, parts in told["memory"].items())
    return told["step"], size / 2**20


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of pairs of cases in the right order, minus the share in the wrong one."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / max(1, len(signs))


def cases(folder: Path, methods: Sequence[str], wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    for method in methods:
        called(folder, "profile", method, *COMMON, *METHODS[method], "runtime=ray", f"name={method}")
        for name, words in OF[method]:
            if name in wanted:
                (seconds, size), (plan, held) = run(folder, method, words), planned(folder, method, words)
                row = {"plan": f"{method}: {name}", "planned, s": f"{plan:.2f}", "measured, s": f"{seconds:.2f}"}
                row |= {"error": f"{plan / seconds - 1:+.0%}", "planned, MiB": f"{held:,.0f}"}
                row |= {"measured, MiB": f"{size:,.0f}", "error of MiB": f"{held / size - 1:+.0%}"}
                yield row | {"load": f"{os.getloadavg()[0]:.1f}"}


def main() -> None:
    options = asked(
        __doc__, folder=Path, methods=[*METHODS], cases=[name for name, _ in (*CASES, *STAGED, *SPANS)], json=KEPT
    )
    folder = options.folder.absolute()
    prepared(folder)
    found = show(cases(folder, options.methods, options.cases), kept=options.json)
    print(f"Kendall's tau {kendall([(float(row['planned, s']), float(row['measured, s'])) for row in found]):.2f}")


if __name__ == "__main__":
    main()
