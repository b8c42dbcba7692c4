"""What overlapping generation and learning gains in real runs on two cores: `python benchmarks/overlap_runs.py`.

GRPO on the demo task, on Ray: one training rank and one rollout worker, a thread each, and the same number of samples
for every rollout.max_lag; once with a reward that costs nothing, once with a judge behind HTTP that takes 200 ms for a
group and four groups at once. Seconds are those of the runs' own metrics, without the first steps. All runs start from
the same policy, which is made first (`--policy` takes one that is there). `benchmarks/overlap.py` simulates up to 512
workers.

    python benchmarks/overlap_runs.py --demo runs/demo/seed0

measures the PPO of a demo that was run (`make demo`) instead, with its policy and judge: in one process on one thread,
and on Ray with and without lag, with the judge in the run's process and in one of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plaudit import Run, load_settings, run
from plaudit.settings.recipes import read_yaml
from plaudit.tasks.demo import DemoFiles, DemoSize, gold, make_demo

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEMO = CONFIGS.parent / "src/plaudit/commands/demo.yaml"
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


@dataclass(frozen=True)
class Outcome:
    """Figures of one run, of its later steps."""

    seconds: float
    """A step."""
    samples: float
    """Of a step."""
    waited: float
    """Share of the time that the learner waited for samples."""
    lag: float
    first: float
    last: float
    """Mean gold of the first and the last quarter."""

    @classmethod
    def of(cls, found: Run, samples: int) -> Outcome:
        metrics, quarter = found.metrics, max(1, len(found.metrics) // 4)
        later = metrics[WARM:]
        seconds = (metrics[-1]["time"] - metrics[WARM - 1]["time"]) / len(later)

        def mean(records: list[dict[str, Any]], name: str) -> float:
            return statistics.fmean(record[name] for record in records)

        return cls(
            seconds,
            samples,
            mean(later, "time/batch") / seconds,
            mean(later, "lag/mean"),
            mean(metrics[:quarter], "reward/gold"),
            mean(metrics[-quarter:], "reward/gold"),
        )


def recipe(output: Path, policy: Path, files: DemoFiles, *, lag: int, reward: dict[str, Any], steps: int) -> Any:
    settings = read_yaml(CONFIGS / "grpo.yaml")
    settings |= {"output": str(output), "overwrite": True, "threads": 1, "log": {"quiet": True}}
    settings |= {"model": {"path": str(policy)}, "data": {"train": str(files.prompts)}, "rewards": [reward]}
    settings["runtime"] = {"kind": "ray"}
    settings["rollout"] |= {"max_lag": lag}
    settings["train"] = {"steps": steps}
    return settings


CASES: dict[str, dict[str, Any]] = {
    "one process, one thread": {},
    "Ray": {"runtime": {"kind": "ray"}},
    "Ray, lag 1": {"runtime": {"kind": "ray"}, "rollout": {"max_lag": 1}},
    "Ray, lag 1, recompute_old=false": {
        "runtime": {"kind": "ray"},
        "rollout": {"max_lag": 1},
        "algorithm": {"recompute_old": False},
    },
}
PHASES = ("time/generate", "time/rewards", "time/rollout_idle", "time/batch", "time/learn", "time/step", "whole")
"""Figures of a step; with what follows it (records, hooks) it is whole."""


def demo_ppo(made: Path, output: Path) -> dict[str, Any]:
    """The recipe of the demo's PPO, from the policy and the judge of a demo."""
    shared, ppo = (read_yaml(DEMO)[name] for name in ("shared", "stages"))
    ppo = ppo["ppo"] | {"method": "ppo", "model": {"path": str(Run(made / "sft").model)}}
    ppo["data"] = shared["data"] | {"train": str(made / "data/prompts.jsonl")}
    ppo["rewards"][0]["path"] = str(Run(made / "reward").model)
    return ppo | {"output": str(output), "overwrite": True, "threads": 1, "log": {"quiet": True}}


def demo(made: Path, output: Path, *, steps: int, rounds: int) -> Table:
    """Medians of the steps of all rounds, whose runs take turns."""
    base = demo_ppo(made, output) | {"train": {"steps": steps}}
    cases = {(name, judges): more for judges in (0, 1) for name, more in CASES.items() if more or not judges}
    found: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for (name, judges), more in cases.items():
            recipe = base | more | {"name": f"{name}, {judges}".replace(",", "").replace(" ", "_").replace("=", "_")}
            recipe |= {part: base[part] | more.get(part, {}) for part in ("rollout", "algorithm")}
            recipe["rewards"] = [{**base["rewards"][0], "workers": judges}, *base["rewards"][1:]]
            metrics = run(load_settings(recipe)).metrics[WARM - 1 :]
            found[name, judges] += [two | {"whole": two["time"] - one["time"]} for one, two in pairwise(metrics)]
    (output / "demo.json").write_text(json.dumps([[*case, records] for case, records in found.items()]) + "\n")
    table = Table(title=f"the demo's PPO, {rounds} x {steps} steps, a thread each: seconds, medians")
    for title in ("", "judge", "of local", *(phase.removeprefix("time/") for phase in PHASES)):
        table.add_column(title, justify="right")
    local = statistics.median(record["whole"] for record in found[next(iter(cases))])
    for (name, judges), records in found.items():
        spent = [statistics.median(record.get(phase, 0.0) for record in records) for phase in PHASES]
        own = "its own process" if judges else "the run's process"
        table.add_row(name, own, f"{spent[-1] / local:.2f}x", *(f"{seconds:.3f}" for seconds in spent))
    return table


def first_policy(output: Path, files: DemoFiles, *, steps: int) -> Path:
    settings = read_yaml(CONFIGS / "sft.yaml")
    settings |= {"output": str(output), "overwrite": True, "log": {"quiet": True}}
    settings["model"] |= {"tokenizer": str(files.tokenizer)}
    settings["data"] |= {"train": str(files.sft), "validation": None}
    settings["train"] |= {"steps": steps}
    return run(load_settings(settings)).model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/overlap"))
    parser.add_argument("--policy", type=Path, help="where the runs start; made anew by default")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sft-steps", type=int, default=250)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", choices=("free", "slow"), default=["free", "slow"])
    parser.add_argument("--demo", type=Path, help="folder of a demo's seed: measure its PPO only")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case of the demo")
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps={options.steps}: the first {WARM} are not counted, give more")
    if options.demo:
        Console().print(demo(options.demo, options.output, steps=options.steps, rounds=options.rounds))
        return
    files = make_demo(options.output / "data", size=DemoSize(pairs=16, pairs_validation=4))
    policy = options.policy or first_policy(options.output, files, steps=options.sft_steps)
    table = Table(title=f"{options.steps} steps, a rank and a rollout worker of one thread each")
    for title in ("reward", "lag", "s a step", "samples/s", "gain", "waited", "mean lag", "gold at first", "at last"):
        table.add_column(title, justify="right")
    found: list[dict[str, Any]] = []
    with slow_judge() as url:
        rewards: dict[str, dict[str, Any]] = {
            "free": {"kind": "function", "function": "plaudit.tasks.demo:gold_reward", "name": "gold"},
            "slow": {"kind": "http", "urls": [url], "name": "gold", "batch": 8, "concurrency": 4},
        }
        for name in options.rewards:
            base: Outcome | None = None
            for lag in options.lags:
                given = recipe(options.output, policy, files, lag=lag, reward=rewards[name], steps=options.steps)
                samples = given["rollout"]["prompts_per_step"] * given["algorithm"]["samples"]
                one = Outcome.of(run(load_settings(given | {"name": f"{name}-lag{lag}"})), samples)
                base = base or one
                found.append({"reward": name, "max_lag": lag, **vars(one)})
                table.add_row(name, str(lag), *cells(one, base))
    (options.output / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table)


def cells(one: Outcome, base: Outcome) -> tuple[str, ...]:
    return (
        f"{one.seconds:.2f}",
        f"{one.samples / one.seconds:.0f}",
        f"{base.seconds / one.seconds:.2f}x",
        f"{one.waited:.0%}",
        f"{one.lag:.2f}",
        f"{one.first:+.2f}",
        f"{one.last:+.2f}",
    )


if __name__ == "__main__":
    main()
