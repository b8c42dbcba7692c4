"""Folders of runs as training leaves them, made in milliseconds: for tests of the page, and to look at it.

python tests/monitor/made_runs.py FOLDER [--answers 1000000]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plaudit.monitor.samples import Samples
from plaudit.monitor.sinks import as_line

WORDS = "the film was slow bright a great plot and music but scenes end warmly with dull songs we liked it".split()
FILMS = ("The Silver Compass", "Winter Harbour", "The Last Orchard", "A Quiet Engine", "Paper Moons")
ENDS = {
    "done": "done: policy in checkpoints\n2026-01-01 12:00:00   next:    plaudit generate",
    "failed": "the run ended: ArithmeticError: two",
    "running": "",
}


PHASES = (
    ("learner", "waits", 0.0, 1.1),
    ("learner", "learns", 1.1, 1.8),
    ("learner", "publishes", 1.8, 2.0),
    ("rollout worker 1", "samples", 0.0, 1.0),
    ("rollout worker 2", "samples", 0.0, 1.1),
    ("rewards", "scores", 0.3, 1.1),
)
"""Who does what in a step, from which second to which."""


def make_run(
    folder: Path,
    *,
    state: str = "done",
    steps: int = 40,
    prompts: int = 4,
    samples: int = 4,
    seed: int = 0,
    texts: Sequence[str] = (),
    references: Sequence[str] = (),
    rate: float = 3e-4,
) -> Path:
    """Write a run's records. `texts` are the answers of its last step, `references` those of its prompts, in turn."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    settings = (
        f"method: ppo\nseed: {seed}\noptimizer: {{learning_rate: {rate}, schedule: cosine}}\nrewards:\n- kind: judge\n"
    )
    (folder / "settings.yaml").write_text(settings)
    begun = time.time() - 2.0 * steps
    _records(folder, steps, rng, begun)
    with Samples(folder / "samples.jsonl", budget=10**9, steps=steps, after=0) as file:
        for step in range(1, steps + 1):
            held_out = [_group(rng, step, 0, samples, (), references)] if step % 10 == 0 else []
            last = texts if step == steps else ()
            kinds: dict[str, Any] = {"validation": (len(held_out), held_out)}
            made = (_group(rng, step, number, samples, last, references) for number in range(prompts))
            kinds["train"] = (prompts, made)
            file.write(step, kinds)
    lines = [f"2026-01-01 12:00:00 step {step:>3}/{steps}  loss 0.1" for step in range(1, steps + 1)]
    lines += [f"2026-01-01 12:00:00 {ENDS[state]}"] if ENDS[state] else []
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    return folder


def _records(folder: Path, steps: int, rng: random.Random, begun: float) -> None:
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "events.jsonl").open("w") as events:
        for step in range(1, steps + 1):
            share, now = step / steps, begun + 2.0 * step
            noise = rng.gauss(0, 0.03)
            record = {"step": step, "epoch": 1, "time": 2.0 * step, "tokens": 1000.0 * step, "time/step": 2.0}
            record |= {"reward/mean": share + noise, "reward/judge": share + noise, "reward/gold": share - share**3}
            record |= {
                "loss/policy": 1 - share + noise,
                "entropy": 2 - share,
                "kl/reference": 6 * share,
                "length/mean": 20.0,
            }
            record |= {"kl/sampler": 1e-7, "tokens_per_second": 900 + 100 * noise}
            record |= {"time/learn": 0.7, "time/batch": 1.1, "learning_rate": 3e-4}
            if step % 10 == 0:
                record["validation/reward/mean"] = share
            metrics.write(as_line(record))
            for worker, phase, begin, end in PHASES:
                stretch = {"worker": worker, "phase": phase, "begin": now + begin, "end": now + end}
                events.write(as_line(stretch | {"version": step - 1}))
    alarm = {"step": steps // 2, "sign": "entropy", "severity": 1.2, "numbers": {}}
    alarm |= {"saw": "entropy has fallen.", "why": "It has settled.", "advice": "Try a lower rate."}
    (folder / "health.jsonl").write_text(as_line(alarm))


def _group(
    rng: random.Random, step: int, number: int, samples: int, texts: Sequence[str], references: Sequence[str]
) -> Iterator[dict[str, Any]]:
    film = FILMS[number % len(FILMS)]
    for sample in range(samples):
        words = rng.choices(WORDS, k=rng.randint(4, 24))
        text = texts[(number * samples + sample) % len(texts)] if texts else " " + " ".join(words)
        pieces = [" " + word for word in text.split(" ")[1:]] if text.startswith(" ") else [text]
        count, reward = len(pieces), rng.gauss(0, 1)
        logprobs = [-rng.expovariate(1.0) for _ in pieces]
        yield {
            "group": number,
            "sample": sample,
            "greedy": False,
            "prompt_id": f"prompts.jsonl:{number + 1}",
            "prompt": f"We saw {film} yesterday. In one word, it was",
            **({"answer": references[number % len(references)]} if references else {}),
            "completion": text,
            "finish": "length" if sample == 3 else "eos",
            "tokens": count,
            "reward": None if sample == 2 and number == 1 else round(reward, 4),
            "score": round(reward, 4),
            "parts": {"judge": round(reward, 4), "gold": round(rng.uniform(-1, 1), 4)},
            "reason": "judge: timed out" if sample == 2 and number == 1 else None,
            "advantage": round(reward - 0.1, 4),
            "versions": [step - 1],
            "ids": list(range(count)),
            "pieces": pieces,
            "logprobs": logprobs,
            "learner": [value + rng.gauss(0, 0.02) for value in logprobs],
            "entropies": [rng.uniform(0, 3) for _ in pieces],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=int, default=0, help="Also a run of this many answers, 64 a step.")
    asked = parser.parse_args()
    make_run(asked.folder / "ppo-high-rate", seed=1, rate=1e-3)
    make_run(asked.folder / "ppo", state="running", steps=60)
    make_run(asked.folder / "seeds" / "failed", state="failed", steps=12)
    if asked.answers:
        make_run(asked.folder / "long", steps=asked.answers // 64, prompts=16)


if __name__ == "__main__":
    main()
