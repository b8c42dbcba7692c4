"""How soon the page shows a run's first answers, and finds words, among a million answers (docs/monitor.md).

    python benchmarks/browsing.py FOLDER [--answers 1000000]

Makes the run in FOLDER if it is not there, starts the server with an empty cache, and asks it as a browser
does: first while the index is being made, then with the whole index. The table has seconds, and answers found.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import KEPT, PLAUDIT, asked, show

PROMPTS, SAMPLES = 16, 4
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "rt", "lo", "sk")]
COMMON = "the film was a plot and music great dull slow".split()
FIRST = ("runs", "metrics", "health", "steps", "answers")
"""What the page asks before it shows answers."""
ASKED: dict[str, dict[str, object]] = {
    "a rare word": {"words": "needle"},
    "a word of every twentieth answer": {"words": "balo"},
    "a word of nearly all answers": {"words": "the"},
    "two words": {"words": "the great"},
    "a beginning": {"words": "ba"},
    "a common word, by reward": {"words": "the", "sort": "reward"},
    "all, by reward": {"sort": "reward"},
    "all, by a part": {"sort": "part:gold"},
    "reward from 3, by length": {"field": "reward", "least": 3, "sort": "length"},
    "answers to one prompt": {"prompt": "prompts.jsonl:7"},
    "the last of all": {"offset": 999_000},
}


def make(folder: Path, answers: int) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(0)
    steps = answers // (PROMPTS * SAMPLES)
    (folder / "settings.yaml").write_text("method: grpo\n")
    with (folder / "metrics.jsonl").open("w") as metrics:
        metrics.writelines(_line({"step": step, "reward/mean": rng.random()}) for step in range(1, steps + 1))
    (folder / "log.txt").write_text(f"2026-01-01 12:00:00 step {steps}/{steps}\n2026-01-01 12:00:00 done: policy\n")
    begin = 0
    with (folder / "samples.jsonl").open("w") as samples, (folder / "samples.index.jsonl").open("w") as index:
        for step in range(1, steps + 1):
            places = [(group, sample) for group in range(PROMPTS) for sample in range(SAMPLES)]
            lines = "".join(_line({"step": step, "kind": "train"} | _answer(rng, step, *place)) for place in places)
            samples.write(lines)
            about = {"step": step, "begin": begin, "end": begin + len(lines), "answers": len(places)}
            index.write(_line(about | {"groups": PROMPTS, "of": PROMPTS}))
            begin += len(lines)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _answer(rng: random.Random, step: int, group: int, sample: int) -> dict[str, Any]:
    words = [*rng.choices(COMMON, k=10), *rng.choices(WORDS, k=14)]
    if (step, group, sample) in ((2, 3, 1), (9000, 3, 1)):
        words.append("needle")
    rng.shuffle(words)
    number, reward = rng.randrange(5000), round(rng.gauss(0, 1), 4)
    return {
        "group": group, "sample": sample, "prompt_id": f"prompts.jsonl:{number}", "prompt": f"We saw film {number}.",
        "completion": " " + " ".join(words), "finish": "eos", "tokens": len(words), "reward": reward,
        "parts": {"gold": round(rng.uniform(-1, 1), 4)}, "advantage": reward, "versions": [step - 1],
    }  # fmt: skip


def seconds(address: str, what: str, **given: object) -> tuple[float, Any]:
    """Ask the server once. Returns seconds and what it said."""
    begun = time.perf_counter()
    with urllib.request.urlopen(f"{address}api/{what}?{urllib.parse.urlencode(given)}") as reply:
        return time.perf_counter() - begun, json.load(reply)


def served(folder: Path, cache: str) -> Iterator[str]:
    command = [*PLAUDIT, "monitor", str(folder), "--serve", "--port", "0"]
    environment = {**os.environ, "PLAUDIT_CACHE": cache}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found
        yield found[0]
        server.terminate()


def measure(address: str, run: str) -> Iterator[dict[str, Any]]:
    _, steps = seconds(address, "steps", run=run)

    def first() -> float:
        return sum(seconds(address, what, run=run, step=steps["step"][-1])[0] for what in FIRST)

    def row(what: str, took: float, found: str = "") -> dict[str, Any]:
        return {"what": what, "seconds": f"{took:.2f}", "found": found}

    yield row("first view, nothing indexed", first())
    begun = time.perf_counter()
    slowest, found = 0.0, {"indexed": 0.0}
    while found["indexed"] < 1:
        took, found = seconds(address, "answers", run=run, words="the")
        slowest = max(slowest, took)
        time.sleep(0.5)
    yield row("index made in", time.perf_counter() - begun)
    yield row("slowest search meanwhile", slowest)
    yield row("first view, indexed", first())
    for name, given in ASKED.items():
        took, found = seconds(address, "answers", run=run, **given)
        yield row(name, took, f"{found['total']:,}")


def main() -> None:
    options = asked(__doc__, folder=Path, answers=1_000_000, json=KEPT)
    name = f"answers-{options.answers}"
    if not (options.folder / name).exists():
        make(options.folder / name, options.answers)
    with tempfile.TemporaryDirectory() as cache:
        for address in served(options.folder, cache):
            show(measure(address, name), kept=options.json)


if __name__ == "__main__":
    main()
