"""Kills processes of runs at random moments, and sees whether each run ends as if nothing had happened.

    --kills, --seed -> rounds: a run on Ray, whose workers, nodes or drivers are killed or frozen -> table

Each round's weights are compared with those of an undisturbed run of the same length, bit for bit. Exits with 1 where
they differ, or where a kill was not survived. The models are tiny: what is shown is recovery, not training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults import HEAD, HEADER, LONGEST, NODE, PHASES, Kill, Killer, descendants, running
from partition import Island, end, is_agent, joined, missing
from rounds import ROUNDS, Round, planned
from safetensors.torch import load_file

from plaudit import Run, load_settings, run
from plaudit.loop.stopping import Stopped
from plaudit.settings.tree import resolved
from plaudit.tasks.demo import DemoFiles, DemoSize, make_demo

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
FAULTS = Path(__file__).resolve().with_name("faults.py")
SIZE = DemoSize(sft=24, sft_validation=4, pairs=16, pairs_validation=4, prompts=24, prompts_test=4, vocabulary=400)

SAVED, SELDOM = 2, 4
"""Steps between checkpoints, and where ranks have mirrors: so many may have to be done again (with mirrors one), one
more while the last is being written, and none that was committed."""
NAMES = {
    "rollout": "rollout worker",
    "judge": "judge",
    "rank": "training rank",
    "server": "parameter server",
    "environment": "environment",
    "node": "node",
    "partition": "node cut off",
    "driver": "driver",
}
"""Of roles, in the published table."""
SPREAD: dict[str, dict[str, Any]] = {
    "2 ranks": {"num_training_workers": 2},
    "zero1": {"num_training_workers": 2, "strategy": "zero1"},
    "zero2": {"num_training_workers": 2, "strategy": "zero2"},
    "sharded": {"num_training_workers": 2, "strategy": "fsdp"},
    "servers": {"num_training_workers": 2, "strategy": "server", "servers": {"count": 2}},
    "cut": {"mesh": {"tensor": 2}},
    "stages": {"mesh": {"pipeline": 2}},
    "square": {"mesh": {"tensor": 2, "pipeline": 2}},
    "stages-sharded": {"mesh": {"data": 2, "pipeline": 2}, "strategy": "fsdp"},
    "grid": {"mesh": {"data": 2, "tensor": 2}},
    "mirrored": {"mesh": {"tensor": 2, "mirrors": 1}},
}
"""Runs of several ranks, which sum gradients in another order than one does: settings of their runtime."""
UNLIKE = ("lag", "servers")
"""Runs whose ends are not compared: samples may be old, and without a lost island gradients are summed otherwise."""
LIMITS = (
    ("nodes found", ("node", "partition"), "found", 6.0),
    ("the next step behind a lost rank or node", ("rank", "node", "partition"), "next_step", 30.0),
)
"""What should hold: counted, not demanded, since a machine may be busy with something else."""
Survive = Callable[[list[Kill], "Task"], bool]
"""Goes through with kills; tells whether the end was that of an undisturbed run."""


def main() -> None:
    options = read_options()
    rounds = planned(options.kills, options.seed, options.only, without=impossible(options.only))
    done = told(options.go_on, rounds)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(make_demo(Path(folder) / "demo", size=SIZE), Path(folder))
        print(HEADER, flush=True)
        clock = Clock(rounds)
        for kills in done:
            print("\n".join(kill.row() for kill in kills), flush=True)
        for round_ in rounds[len(done) :]:
            print(clock.before(round_), file=sys.stderr, flush=True)
            attempt(round_.kills, task.of(f"{round_.kind}{round_.number}"))
            print("\n".join(kill.row() for kill in round_.kills), flush=True)
            done.append(round_.kills)
            clock.after(round_)
            if options.go_on is not None:
                write(options.go_on, round_)
    kills = [kill for mine in done for kill in mine]
    print(f"\n{summary(kills)}\n\n{table(kills)}")
    sys.exit(0 if all(kill.fine for kill in kills) else 1)


def impossible(only: str | None) -> list[str]:
    """Kinds of rounds that this machine cannot do. Raises SystemExit where no others are wanted."""
    if (reason := missing()) is None:
        return []
    if only == "partitions":
        raise SystemExit(f"--only partitions {reason}")
    print(f"no partitions: this {reason}", file=sys.stderr)
    return ["partitions"]


def attempt(kills: list[Kill], task: Task) -> None:
    """What a run ends with is told, and the next round begins: each is to tell of its own."""
    try:
        survive(kills, task)
    except Stopped as stopped:
        raise SystemExit(stopped.code) from stopped
    except Exception:  # noqa: BLE001 - its kills are not fine, and the command fails in the end
        traceback.print_exc()


class Clock:
    """How far it is, and how long the rest will take: as long as those done, by what kinds of kills take."""

    def __init__(self, rounds: Sequence[Round]):
        self.rounds, self.started, self.spent, self.guessed = rounds, time.monotonic(), 0.0, 0.0

    def before(self, round_: Round) -> str:
        self.started = time.monotonic()
        killed = sum(len(other.kills) for other in self.rounds[: round_.number])
        left = sum(self.seconds(other) for other in self.rounds[round_.number :])
        left *= self.spent / self.guessed if self.guessed else 1.0
        of = f"round {round_.number + 1} of {len(self.rounds)}: {len(round_.kills)} kills ({round_.kind})"
        in_all = sum(len(other.kills) for other in self.rounds)
        return f"{of}; {killed} of {in_all} done in {self.spent / 60:.0f} min, about {left / 60:.0f} min left"

    def after(self, round_: Round) -> None:
        self.spent += time.monotonic() - self.started
        self.guessed += self.seconds(round_)

    def seconds(self, round_: Round) -> float:
        return len(round_.kills) * ROUNDS[round_.kind].seconds


def write(file: Path, round_: Round) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps([asdict(kill) for kill in round_.kills]) + "\n")


def told(file: Path | None, rounds: Sequence[Round]) -> list[list[Kill]]:
    """What a command before wrote down of these rounds."""
    if file is None or not file.exists():
        return []
    found = [[Kill(**kill) for kill in json.loads(line)] for line in file.read_text().splitlines()]
    for mine, round_ in zip(found, rounds, strict=False):
        if [kill.planned for kill in mine] != [kill.planned for kill in round_.kills]:
            raise SystemExit(
                f"{file} holds another command's kills: give the same --kills, --seed and --only, or another file"
            )
    return found[: len(rounds)]


class Task:
    """The runs of a round: a policy that knows nothing, a judge that knows little, and folders for them."""

    def __init__(self, demo: DemoFiles, folder: Path, *, judge: Path | None = None):
        self.demo, self.folder = demo, folder
        self._judge = judge

    def of(self, name: str) -> Task:
        """The same with a folder of its own."""
        return Task(self.demo, self.folder / name, judge=self.judge)

    @property
    def judge(self) -> Path:
        if self._judge is None:
            more = {"method": "reward", "train": {"steps": 2}}
            more["data"] = {"train": str(self.demo.preferences), "max_tokens": 64, "max_prompt_tokens": 40}
            self._judge = run(load_settings(self._common("judge") | more)).model
        return self._judge

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "name": "run",
            "output": str(self.folder / name),
            "threads": 1,
            "model": {"config": dict(GPT2), "tokenizer": str(self.demo.tokenizer)},
            "optimizer": {"learning_rate": 0.003},
            "log": {"quiet": True},
        }

    def recipe(self, kills: Sequence[Kill], name: str, *, workers: int = 0, **more: Any) -> dict[str, Any]:
        """A run of short steps that is long enough for the kills, with a checkpoint after every other one; judges and
        rollout workers in processes of their own where `workers` is not 0."""
        rewards: list[dict[str, Any]] = [{"kind": "function", "function": f"{FAULTS}:varied"}]
        rewards.append({"kind": "judge", "path": str(self.judge), "workers": min(workers, 1)})
        recipe = self._common(name) | {
            "method": "ppo" if kills[0].method == "ppo" else "grpo",
            "data": {"train": str(self.demo.prompts), "max_prompt_tokens": 40},
            "rollout": {
                "prompts_per_step": 3,
                "max_tokens": 10,
                "slots": 8,
                "workers": max(workers, 1),
                "max_lag": int(kills[0].method == "lag"),
            },
            "rewards": rewards,
            "train": {"steps": kills[-1].step + len(kills) + 4},
            "save": {"every": SAVED},
            **more,
        }
        if kills[0].method == "episodes":
            recipe["model"]["config"]["n_positions"] = 256
            recipe["data"] |= {"chat_template": "default", "as_chat": True, "max_prompt_tokens": 60}
            recipe["rollout"] |= {"stop": ["e", "a", "t"], "max_tokens": 30}
            recipe["environment"] = {"function": f"{FAULTS}:Letters", "max_turns": 4, "max_tokens": 150}
            recipe["environment"]["workers"] = workers
            recipe["rewards"] = [{"kind": "environment"}]
        return recipe


def survive(kills: list[Kill], task: Task) -> None:
    """Do it to a run; notes in each kill whether it ended as an undisturbed one."""
    how: dict[str, Survive] = {"driver": drivers_killed, "node": nodes_lost, "partition": nodes_lost}
    fine = how.get(kills[0].role, workers_killed)(kills, task)
    for kill in kills:
        again = 0 if kill.role in ("rollout", "judge", "environment") else 1 if kill.method == "mirrored" else SAVED + 1
        kill.fine = fine and kill.survived and kill.repeated <= again
        kill.equal = None if kill.method in UNLIKE else kill.fine


def workers_killed(kills: list[Kill], task: Task) -> bool:
    """The undisturbed run is local unless there are several ranks, which sum gradients in another order than one."""
    several = kills[0].method in SPREAD
    runtime = RUNTIME | SPREAD.get(kills[0].method, {})
    whole = task.recipe(kills, "whole", **({"workers": 1, "runtime": runtime} if several else {}))
    killer = Killer(kills)
    seldom = {"save": {"every": SELDOM}} if kills[0].method == "mirrored" else {}
    recipe = task.recipe(kills, "killed", workers=2, runtime=runtime, **seldom)
    with killer.at_work():
        disturbed = run(load_settings(recipe), hooks=[killer.hook])
    said = (disturbed.folder / "log.txt").read_text()
    blamed = re.findall(r"lost ((?:training rank|parameter server|rollout worker|judge|environment) \d+)", said)
    if sorted(blamed) != sorted(kill.victim.partition(" (")[0] for kill in kills):  # an idle judge is missed later
        print(f"those that were hit are not those that are said to be lost: {', '.join(blamed)}")
        return False
    if kills[0].method in UNLIKE:
        told = [record["step"] for record in disturbed.metrics] == list(range(1, steps(disturbed) + 1))
        return told and all(record.get("lag/max", 0) <= 1 for record in disturbed.metrics)
    return alike(run(load_settings(whole)), disturbed)


def nodes_lost(kills: list[Kill], task: Task) -> bool:
    """Two nodes with two workers each, one or two of these ranks; a node is lost as a whole, another one joins. What is
    cut off comes back later, and is to end by itself."""
    from ray.cluster_utils import Cluster

    spread = SPREAD.get(kills[0].method, {})
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    islands: list[Island] = []
    try:
        cluster.add_node(**NODE)
        if kills[0].role == "partition":
            islands.append(Island(cluster.address, NODE["num_cpus"]))
            joined(cluster, 3, islands[0])
        else:
            cluster.add_node(**NODE)
        each = {"resources_per_worker": {"CPU": 1}, "resources_per_rollout_worker": {"CPU": 1}}
        runtime = {**CLUSTER, **spread, **each, "address": cluster.address}
        recipe = task.recipe(kills, "killed", workers=1 if spread else 2, runtime=runtime)
        recipe["rewards"][1]["resources"] = {"CPU": 1}
        killer = Killer(kills, cluster=cluster, expected=4, islands=islands)
        with killer.at_work():
            disturbed = run(load_settings(recipe), hooks=[killer.hook])
        if not all(island.empties(LONGEST) for island in islands[:-1]):
            print("processes of a node that was cut off are left")
            return False
    finally:
        try:
            end(islands)
        finally:
            cluster.shutdown()
    alone = {"workers": 1, "runtime": RUNTIME | spread} if spread else {}
    return alike(run(load_settings(task.recipe(kills, "whole", **alone))), disturbed)


def drivers_killed(kills: list[Kill], task: Task) -> bool:
    """Each is the driver that went on behind the one before it. Found is when nothing of it is left."""
    settings = load_settings(task.recipe(kills, "killed", workers=2, runtime=RUNTIME) | {"resume": "latest"})
    task.folder.mkdir(parents=True, exist_ok=True)
    file = task.folder / "settings.yaml"
    file.write_text(resolved(settings))
    done = Run(task.folder / "killed" / "run")
    before: Kill | None = None
    for kill in (*kills, Kill("driver", "save", sys.maxsize)):
        code, begun = drive(kill, before, file, done)
        if before is not None:
            before.repeated = before.reached - went_on_from(done)
        if code != -signal.SIGKILL:
            break
        kill.at, kill.reached = time.monotonic(), steps(done)
        while (left := lasting(begun)) and time.monotonic() < kill.at + LONGEST:
            time.sleep(0.05)
        if left:
            print(f"processes of a killed driver are there after {LONGEST:g} s: {', '.join(map(shown, left))}")
        else:
            kill.found = time.monotonic() - kill.at
        before = kill
    if code != 0:
        print(f"a driver ended with {code}; its log: {file.with_name('log.txt').read_text()[-5000:]}")
    return code == 0 and alike(run(load_settings(task.recipe(kills, "whole"))), done)


def drive(kill: Kill, before: Kill | None, file: Path, done: Run) -> tuple[int, set[int]]:
    """A driver that goes on from where the one `before` was killed, up to its own end. Returns its exit code and the
    processes that it started."""
    command = [sys.executable, str(FAULTS), str(file), kill.phase, str(kill.step)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started, begun = time.monotonic(), set[int]()
    with file.with_name("log.txt").open("ab") as log:
        driver = subprocess.Popen(command, env=environment, stderr=log)
    ended = False
    try:
        while not ended:
            ended = driver.poll() is not None
            begun |= descendants(driver.pid)
            if before is not None and before.next_step is None and steps(done) > before.reached:
                before.next_step = time.monotonic() - started
            time.sleep(0.05)
    finally:
        driver.kill()
    return driver.returncode, begun


def lasting(processes: set[int]) -> set[int]:
    """Those of a driver's run that have not ended. Left out are Ray's two agents of a node, which end a minute after
    it: so long they try to tell its cluster. One that was just begun may still look like the raylet that began it."""
    return {process for process in running(processes) if not is_agent(process)}


def shown(process: int) -> str:
    with suppress(OSError):
        return f"{process} ({Path(f'/proc/{process}/cmdline').read_text().replace(chr(0), ' ').strip()})"
    return f"{process} (ended)"


def steps(done: Run) -> int:
    """Steps recorded so far, the one that is being written left out."""
    metrics = done.folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def went_on_from(done: Run) -> int:
    """The step of the checkpoint that its last sitting resumed; 0 where there was none."""
    sitting = (done.folder / "log.txt").read_text().rpartition("logs and samples in")[2]
    found = re.search(r"resumed \S+: step (\d+) of", sitting)
    return int(found[1]) if found else 0


CLUSTER = {"kind": "ray", "heartbeat_timeout": 5.0, "max_failures_per_hour": -1}
RUNTIME = CLUSTER


def alike(whole: Run, disturbed: Run) -> bool:
    """The same weights of every model to the bit, and the same rewards on the way there."""
    roles = sorted(path.name for path in (whole.folder / "checkpoints").iterdir() if path.name != "state")
    same = all(same_weights(whole, disturbed, role=role) for role in roles)
    return same and rewards(whole) == rewards(disturbed)


def same_weights(a: Run, b: Run, *, role: str = "policy") -> bool:
    first, second = (load_file(found.checkpoint(role) / "model.safetensors") for found in (a, b))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def rewards(done: Run) -> list[tuple[float, float]]:
    return [(record["step"], record["reward/mean"]) for record in done.metrics]


def summary(kills: Sequence[Kill]) -> str:
    lines = [f"{len(kills)} kills, {sum(not kill.fine for kill in kills)} mismatches ({time.strftime('%Y-%m-%d')})"]
    for text, roles, name, limit in LIMITS:
        mine = [getattr(kill, name) for kill in kills if kill.role in roles]
        within = sum(seconds is not None and seconds <= limit for seconds in mine)
        lines.append(f"{text} within {limit:g} s: {within} of {len(mine)}")
    for role in sorted({kill.role for kill in kills}):
        for name in ("found", "next_step", "back"):
            values = [getattr(k, name) for k in kills if k.role == role and getattr(k, name) is not None]
            if values:
                text = f"{role}, {name.replace('_', ' ')}: median {statistics.median(values):.1f} s"
                lines.append(f"{text}, longest {max(values):.1f} s, of {len(values)}")
    return "\n".join(lines)


def table(kills: Sequence[Kill]) -> str:
    """As docs/recovery.md has it: seconds are median / longest, steps the most. No ends are compared where samples may
    be old."""
    lines = [
        "| what | phase | kills | of them frozen | found after | next step after | steps again | end equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for role, phase in itertools.product(dict.fromkeys([*NAMES, *(kill.role for kill in kills)]), PHASES):
        mine = [kill for kill in kills if (kill.role, kill.phase) == (role, phase)]
        if mine:
            frozen = sum(kill.signal == signal.SIGSTOP for kill in mine)
            found, going = (spread([getattr(kill, name) for kill in mine]) for name in ("found", "next_step"))
            bad, compared = sum(not kill.fine for kill in mine), sum(kill.equal is not None for kill in mine)
            equal = "yes" if compared == len(mine) else f"yes ({compared} of {len(mine)})" if compared else "-"
            repeated = max(kill.repeated for kill in mine)
            cells = [NAMES.get(role, role), phase, len(mine), frozen or "-", found, going, repeated]
            lines.append(" | ".join(map(str, ["|", *cells, f"NO ({bad})" if bad else equal, "|"])).replace("| |", "|"))
    return "\n".join(lines)


def spread(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{statistics.median(known):.1f} / {max(known):.1f}" if known else "-"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(ROUNDS), help="rounds of this kind")
    parser.add_argument("--go-on", type=Path, metavar="FILE", help="keep rounds there, and leave out those that it has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
