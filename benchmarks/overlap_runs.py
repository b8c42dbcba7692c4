"""What overlapping generation and learning gains in real runs on two cores: `python benchmarks/overlap_runs.py`.

GRPO on the demo task, on Ray: one training rank and one rollout worker, a thread each, and the same number of samples
for every rollout.max_lag; once with a reward that costs nothing, once with a judge behind HTTP that takes 200 ms for a
group and four groups at once. Seconds are those of the runs' own metrics, without the first steps. All runs start from
the same policy, which is made first (`--policy` takes one that is there). `benchmarks/overlap.py` simulates up to 512
workers.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from harness import ROOT, asked, show

from plaudit import Run, load_settings, run
from plaudit.settings.recipes import read_yaml
from plaudit.tasks.demo import DemoFiles, DemoSize, gold, make_demo

CONFIGS = ROOT / "configs"
JUDGE_SECONDS = 0.2
WARM = 3
"""Steps before the clock counts: the first samples and kernels of each process."""


class SlowJudge(BaseHTTPRequestHandler):
    """Speaks the protocol of docs/rewards.md, and takes its time."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        items = json.loads(body)["items"]
        time.sleep(JUDGE_SECONDS)
        scores = [gold(item["prompt"], item["completion"]) for item in items]
        with suppress(BrokenPipeError):  # the run has ended without this answer
            self._send(json.dumps({"version": 1, "scores": scores, "reasons": [""] * len(scores)}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def slow_judge() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def figures(found: Run, samples: int) -> dict[str, float]:
    """Of a run's later steps: seconds, samples a second, the share of time that the learner waited, mean lag; and mean
    gold of the first and the last quarter of all."""
    metrics, quarter = found.metrics, max(1, len(found.metrics) // 4)
    later = metrics[WARM:]
    seconds = (metrics[-1]["time"] - metrics[WARM - 1]["time"]) / len(later)

    def mean(records: list[dict[str, Any]], name: str) -> float:
        return statistics.fmean(record[name] for record in records)

    gold = [mean(part, "reward/gold") for part in (metrics[:quarter], metrics[-quarter:])]
    waited, lag = mean(later, "time/batch") / seconds, mean(later, "lag/mean")
    names = ("s a step", "samples/s", "waited", "mean lag", "gold at first", "at last")
    return dict(zip(names, (seconds, samples / seconds, waited, lag, *gold), strict=True))


def recipe(output: Path, policy: Path, files: DemoFiles, *, lag: int, reward: dict[str, Any], steps: int) -> Any:
    settings = read_yaml(CONFIGS / "grpo.yaml")
    settings |= {"output": str(output), "overwrite": True, "threads": 1, "log": {"quiet": True}}
    settings |= {"model": {"path": str(policy)}, "data": {"train": str(files.prompts)}, "rewards": [reward]}
    settings["runtime"] = {"kind": "ray"}
    settings["rollout"] |= {"max_lag": lag}
    settings["train"] = {"steps": steps}
    return settings


def first_policy(output: Path, files: DemoFiles, *, steps: int) -> Path:
    settings = read_yaml(CONFIGS / "sft.yaml")
    settings |= {"output": str(output), "overwrite": True, "log": {"quiet": True}}
    settings["model"] |= {"tokenizer": str(files.tokenizer)}
    settings["data"] |= {"train": str(files.sft), "validation": None}
    settings["train"] |= {"steps": steps}
    return run(load_settings(settings)).model


def main() -> None:
    options = asked(
        __doc__,
        output=Path("runs/overlap"),
        policy=(Path(), "where the runs start; made anew by default"),
        steps=(40, f"the first {WARM} are not counted"),
        sft_steps=250,
        lags=[0, 1, 2],
        rewards=(["free", "slow"], "one of these or both"),
    )
    if options.steps <= WARM:
        raise SystemExit(f"--steps={options.steps}: the first {WARM} are not counted, give more")
    files = make_demo(options.output / "data", size=DemoSize(pairs=16, pairs_validation=4))
    policy = options.policy if options.policy.name else first_policy(options.output, files, steps=options.sft_steps)
    title = f"{options.steps} steps, a rank and a rollout worker of one thread each"
    with slow_judge() as url:
        show(gains(options, policy, files, url), title=title, kept=options.json)


def gains(options: Any, policy: Path, files: DemoFiles, url: str) -> Iterator[dict[str, Any]]:
    """A row for each reward and lag."""
    rewards: dict[str, dict[str, Any]] = {
        "free": {"kind": "function", "function": "plaudit.tasks.demo:gold_reward", "name": "gold"},
        "slow": {"kind": "http", "urls": [url], "name": "gold", "batch": 8, "concurrency": 4},
    }
    for name in options.rewards:
        base = 0.0
        for lag in options.lags:
            given = recipe(options.output, policy, files, lag=lag, reward=rewards[name], steps=options.steps)
            samples = given["rollout"]["prompts_per_step"] * given["algorithm"]["samples"]
            one = figures(run(load_settings(given | {"name": f"{name}-lag{lag}"})), samples)
            base = base or one["s a step"]
            told = {key: f"{value:.2f}" for key, value in one.items()}
            yield {"reward": name, "lag": lag, "gain": f"{base / one['s a step']:.2f}x"} | told


if __name__ == "__main__":
    main()
