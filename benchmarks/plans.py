"""Plans beside what runs take, and plans of clusters that nobody here has.

    python benchmarks/plans.py measured runs/plans       real runs of a dozen plans on this machine: a table
    python benchmarks/plans.py counted runs/plans        runs of one thread in CPU seconds, beside others
    python benchmarks/plans.py simulated                 8 to 1,024 GPUs, as in ReaL's paper: no figure is measured
    python benchmarks/plans.py pictures docs             who computes what when, of two of the latter

A measured case is a run of four steps in processes of its own; its step is the median without the first. Its memory is
the sum of what all of its processes took at most. ReaL's paper is https://arxiv.org/abs/2406.14088.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from plaudit.models.config import DecoderConfig
from plaudit.models.families import read_config
from plaudit.preflight.cluster import problem_of
from plaudit.preflight.cost import Costs
from plaudit.preflight.placement import WIDTHS
from plaudit.preflight.profile import Curve, Link, Profile
from plaudit.preflight.search import Option, Problem, best
from plaudit.settings.recipes import read_settings

PLAUDIT = [sys.executable, "-m", "plaudit.commands.cli"]
STEPS = 4
WORKER = b"ray::Host"
"""How Ray calls a process that works for us."""
FRESH = "{model_type: gpt2, n_embd: %d, n_layer: %d, n_head: 4, n_positions: 256}"
POLICY, JUDGE = FRESH % (192, 4), FRESH % (256, 6)
COMMON = [
    "model.tokenizer=data/tokenizer",
    f"model.config={POLICY}",
    "data.train=data/prompts.jsonl",
    "data.max_prompt_tokens=64",
    "rewards=[{kind: judge, path: judge}]",
    "rollout.max_tokens=64",
    f"train.steps={STEPS}",
    "save.every=1000 steps",
    "output=.",
]
METHODS = {
    "ppo": ["rollout.prompts_per_step=64", "algorithm.minibatches=2"],
    "grpo": ["rollout.prompts_per_step=8", "algorithm.samples=8"],
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


# --- measured


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


def descendants(root: int) -> Iterator[Path]:
    """Folders in /proc of a process and of all that it started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        above: int | None = process
        while above is not None and above != root:
            above = parents.get(above)
        if above == root:
            yield Path("/proc") / str(process)


def peaks(root: int) -> dict[str, float]:
    """Bytes that the run's own processes have taken at most: the driver and Plaudit's workers, without Ray's."""
    found = {}
    for path in descendants(root):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            if path.name != str(root) and words[0] != WORKER:
                continue
            lines = (path / "status").read_text().splitlines()
            most = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
            shared = next((float(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem")), 0.0)
        except (OSError, StopIteration):
            continue
        found[path.name] = most - shared
    return found


def run(folder: Path, method: str, words: Sequence[str]) -> tuple[float, float]:
    """Seconds of a step, and bytes of all processes."""
    command = [
        *PLAUDIT,
        method,
        *COMMON,
        *METHODS[method],
        *words,
        f"name=run-{method}",
        "overwrite=true",
        "log.quiet=true",
    ]
    log = (folder / "run.log").open("w")
    most: dict[str, float] = {}
    with subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        while process.poll() is None:
            for name, size in peaks(process.pid).items():
                most[name] = max(size, most.get(name, 0.0))
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit((folder / "run.log").read_text()[-2000:])
    lines = (folder / f"run-{method}" / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(line)["time/step"] for line in lines[1:]), sum(most.values())


def planned(folder: Path, method: str, words: Sequence[str]) -> tuple[float, float]:
    given = [*COMMON, *METHODS[method], *words, f"name={method}"]
    told = json.loads(called(folder, "plan", method, *given, "--json"))["plans"]["now"]
    set_by = dict(word.partition("=")[::2] for word in words)
    counts = {
        "rank": int(set_by.get("runtime.num_training_workers", 1)),
        "rollout worker": int(set_by.get("rollout.workers", 1)),
    }
    size = sum(sum(parts.values()) * counts.get(name, 1) for name, parts in told["memory"].items())
    return told["step"], size


def measured(folder: Path, methods: Sequence[str]) -> None:
    prepared(folder)
    found: list[dict[str, Any]] = []
    for method in methods:
        called(folder, "profile", method, *COMMON, *METHODS[method], "runtime=ray", f"name={method}")
        for name, words in CASES:
            seconds, size = run(folder, method, words)
            plan, held = planned(folder, method, words)
            found.append(
                {
                    "case": f"{method}: {name}",
                    "planned": plan,
                    "measured": seconds,
                    "planned bytes": held,
                    "bytes": size,
                }
                | {"load": os.getloadavg()[0]}
            )
            print(found[-1], flush=True)
    (folder / "plans.json").write_text(json.dumps(found, indent=1))
    print(table_of(found))


def table_of(found: Sequence[Mapping[str, Any]]) -> str:
    """The cases as Markdown, and how well plans order them."""
    lines = [
        "| plan | planned, s | measured, s | error | planned, MiB | measured, MiB | error |",
        "|---|" + "---:|" * 6,
    ]
    for one in found:
        plan, seconds = one["planned"], one["measured"]
        held, took = (one[name] / 2**20 for name in ("planned bytes", "bytes"))
        lines.append(
            f"| {one['case']} | {plan:.2f} | {seconds:.2f} | {plan / seconds - 1:+.0%} | {held:,.0f} | {took:,.0f} | "
            f"{held / took - 1:+.0%} |"
        )
    tau = kendall([(one["planned"], one["measured"]) for one in found])
    loads = [one["load"] for one in found]
    return "\n".join([*lines, "", f"Kendall's tau {tau:.2f}; load average {min(loads):.1f} to {max(loads):.1f}"])


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of pairs of cases in the right order, minus the share in the wrong one."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / max(1, len(signs))


# --- counted

PAIRS = ["data.train=data/preferences.jsonl", "data.max_tokens=128", "train.batch_size=16"]
SINGLE: Sequence[tuple[str, str, list[str]]] = (
    ("ppo", "64 prompts", []),
    ("ppo", "32 prompts", ["rollout.prompts_per_step=32"]),
    ("ppo", "answers of 32 tokens", ["rollout.max_tokens=32"]),
    ("ppo", "16 slots", ["rollout.slots=16"]),
    ("ppo", "8 mini-batches", ["algorithm.minibatches=8"]),
    ("grpo", "8 answers to 8 prompts", []),
    ("grpo", "16 answers to 8 prompts", ["algorithm.samples=16"]),
    ("grpo", "8 answers to 4 prompts", ["rollout.prompts_per_step=4"]),
    ("dpo", "16 pairs", PAIRS),
    ("dpo", "64 pairs", [*PAIRS, "train.batch_size=64"]),
)
"""Method, name, overrides; one profile a method, from its first case."""


def of(method: str, words: Sequence[str]) -> list[str]:
    """The whole settings of a case."""
    rollout = ("rewards", "rollout") if method == "dpo" else ()
    common = [word for word in COMMON if not word.startswith(rollout)] if rollout else COMMON
    return [*common, *METHODS.get(method, []), "threads=1", *words]


def one(method: str, words: Sequence[str]) -> None:
    """Do a run in this process; print CPU seconds of a step, the median without the first, and bytes."""
    from plaudit import load_settings
    from plaudit import run as begin
    from plaudit.preflight.measure import resident

    marks: list[float] = []

    async def mark(moment: Any) -> None:
        marks.append(time.process_time())

    given = [*of(method, words), "name=one", "overwrite=true", "log.quiet=true", "log.page=false"]
    begin(load_settings(None, given, method=method), hooks=[mark])
    steps = [after - before for before, after in pairwise(marks)]
    print(json.dumps([median(steps[1:]), resident("VmHWM")]))


def counted(folder: Path) -> None:
    prepared(folder)
    found: list[dict[str, Any]] = []
    profiled = set[str]()
    for method, name, words in SINGLE:
        if method not in profiled:
            called(folder, "profile", method, *of(method, words), f"name={method}")
            profiled.add(method)
        command = [sys.executable, __file__, "one", "--case", method, *words]
        seconds, size = json.loads(
            subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.splitlines()[-1]
        )
        told = json.loads(called(folder, "plan", method, *of(method, words), f"name={method}", "--json"))["plans"][
            "now"
        ]
        held = sum(told["memory"]["run"].values())
        case = {
            "case": f"{method}: {name}",
            "planned": told["step"],
            "measured": seconds,
            "planned bytes": held,
            "bytes": size,
        }
        found.append(case | {"load": os.getloadavg()[0]})
        print(found[-1], flush=True)
    (folder / "counted.json").write_text(json.dumps(found, indent=1))
    print(table_of(found))


# --- simulated


@dataclass(frozen=True)
class Sheet:
    """A GPU by its data sheet, with what usual code reaches of it."""

    name: str
    flops: float
    """Of bfloat16 products a second, and"""
    memory: float
    bandwidth: float
    """of its memory, bytes a second, both as reached."""
    link: float
    """Within a node, bytes a second, and"""
    network: float
    """between nodes."""
    launch: float = 4e-5
    """Seconds that a layer takes at least."""


H100 = Sheet("NVIDIA H100", 400e12, 80e9, 2.4e12, 300e9, 40e9)
"""989e12 flops and 3.35e12 bytes a second by NVIDIA's data sheet, of which usual training and decoding reach 40 and 70
percent; NVLink 450e9 and 400 Gbit InfiniBand a GPU, two thirds and four fifths reached."""


def by_sheet(sheet: Sheet, models: Mapping[str, DecoderConfig], prompt: int, answer: int) -> Profile:
    """A profile by arithmetic, for `models` by role, in bfloat16."""
    passes = {}
    for role, config in models.items():
        square = 4 * config.layers * config.heads * config.head_dim / sheet.flops
        for kind, factor in (("train", 3.0), ("score", 1.0)):
            token = factor * 2 * config.parameters / sheet.flops
            numbers = (factor * config.layers * sheet.launch, token, factor * square, 0.0)
            passes[f"{role}/{kind}"] = Curve(numbers, numbers)
    policy = models["policy"]
    cached = 4.0 * policy.layers * policy.kv_heads * policy.head_dim / sheet.bandwidth
    step = policy.layers * sheet.launch + 2 * policy.parameters / sheet.bandwidth
    decode = (step, 2 * policy.parameters / sheet.flops, cached)
    links = {"all_reduce": Link(2e-5, sheet.link), "all_gather": Link(2e-5, sheet.link)}
    return Profile(
        hardware=f"{sheet.name} (by its data sheet)",
        devices=8,
        gpu=True,
        capacity=sheet.memory,
        passes=passes,
        updates={role: 16.0 * config.parameters / sheet.bandwidth for role, config in models.items()},
        decode=Curve(decode, decode),
        links=links | {"store": Link(1e-3, sheet.network), "network": Link(5e-5, sheet.network)},
        memory={"process": 3e9},
        prompts=(prompt,),
        answers=(answer,),
        notes=("simulated: no figure was measured",),
    )


LLAMA = {  # width, layers, heads, kv_heads, mlp_width: LLaMA's own sizes, which ReaL's paper takes
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}


def llama(size: str) -> dict[str, Any]:
    width, layers, heads, kv_heads, inner = LLAMA[size]
    return {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
    }  # fmt: skip


def costs_of(folder: Path, critic: str, devices: int) -> Costs:
    """PPO of ReaL's paper: an actor of 7B, prompts and answers of 1,024 tokens, 512 prompts for each 16 GPUs, 8
    mini-batches. The critic and the judge are of another size."""
    path = folder / critic
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(llama(critic)))
    words = [
        "method=ppo", f"critic.path={path}", f"rewards=[{{kind: judge, path: {path}}}]", "learn.precision=bfloat16",
        "model.config=" + json.dumps(llama("7B")).replace('"', ""), "rollout.max_tokens=1024", "rollout.slots=128",
        f"rollout.prompts_per_step={32 * devices}", "algorithm.minibatches=8", "learn.micro_tokens=16384",
        "learn.activation_checkpointing=true", "data.max_prompt_tokens=1024",
    ]  # fmt: skip
    settings = read_settings(None, words)
    actor, other = read_config(llama("7B")), read_config(llama(critic))
    models = {"policy": actor, "reference": actor, "critic": other, "judge 0": other}
    return Costs(settings, by_sheet(H100, models, 1024, 1024), devices)


def by_hand(problem: Problem, *, symmetric: bool) -> tuple[Option, ...] | None:
    """The usual placements: every call on all devices in turn. Symmetric: in one mesh, with as much data as fits.
    Heuristic: scores and judges at the same time on equal parts, each call in its own mesh with most data."""
    middle = [
        n for n, call in enumerate(problem.calls) if not call.name.endswith(" trains") and call.name != "generate"
    ]
    part = problem.devices // 4
    for tensor in WIDTHS:
        plan: list[Option] = []
        for number, call in enumerate(problem.calls):
            where = (0, problem.devices) if symmetric or number not in middle else (middle.index(number) * part, part)
            here = [one for one in call.options if (one.first, one.count) == where]
            fitting = [one for one in here if one.mesh == tensor or (not symmetric and one.mesh > tensor)]
            plan += [min(fitting, key=lambda one: one.mesh)] if fitting else []
        if len(plan) == len(problem.calls) and problem.fits(plan):
            return tuple(plan)
    return None


def simulated(folder: Path, sizes: Sequence[int]) -> Iterator[str]:
    heads = ("GPUs", "critic and judge", "symmetric, s", "heuristic, s", "searched, s")
    yield f"| {' | '.join((*heads, 'over symmetric', 'over heuristic', 'search, CPU s'))} |"
    yield "|---:|---|" + "---:|" * 6
    for devices in sizes:
        for critic in ("7B", "13B", "34B", "70B"):
            begun = time.process_time()
            problem = problem_of(costs_of(folder, critic, devices), devices, 0.9 * H100.memory - 3e9)
            found = best(problem)
            taken = time.process_time() - begun
            if found is None:
                yield f"| {devices} | {critic} | does not fit | | | | | {taken:.1f} |"
                continue
            hands = [by_hand(problem, symmetric=which) for which in (True, False)]
            seconds = [None if hand is None else problem.seconds(hand) for hand in hands]
            shown = " | ".join("does not fit" if one is None else f"{one:.1f}" for one in seconds)
            gains = " | ".join("" if one is None else f"{one / found.seconds - 1:+.0%}" for one in seconds)
            star = "" if found.proved else " *"
            yield f"| {devices} | {critic} | {shown} | {found.seconds:.1f}{star} | {gains} | {taken:.1f} |"


# --- pictures

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def picture(problem: Problem, plans: Mapping[str, Sequence[Option]], path: Path) -> None:
    """Devices from bottom to top, seconds from left to right, a colour a call."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(plans), 1, figsize=(9, 2.6 * len(plans)), sharex=True, squeeze=False)
    for axes, (title, plan) in zip(rows[:, 0], plans.items(), strict=True):
        for number, (call, one, end) in enumerate(zip(problem.calls, plan, problem.ends(plan), strict=True)):
            mesh = f"{one.count // one.mesh} x {one.mesh}"
            axes.barh(one.first + one.count / 2, one.seconds, left=end - one.seconds, height=one.count,
                      color=COLOURS[number], edgecolor="white", label=f"{call.name}")  # fmt: skip
            if one.seconds > 0.085 * problem.seconds(plan):
                axes.text(
                    end - one.seconds / 2,
                    one.first + one.count / 2,
                    f"{call.name}\n{mesh}",
                    ha="center",
                    va="center",
                    fontsize=7,
                )
        axes.set(title=f"{title}: {problem.seconds(plan):.1f} s a step", ylabel="GPU", ylim=(0, problem.devices))
    rows[-1, 0].set_xlabel("seconds (simulated); data x tensor in each box")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measured", "counted", "one", "simulated", "pictures"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/plans"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--case", nargs="+", help="of `one`: method and overrides")
    options = parser.parse_args()
    if options.what == "measured":
        measured(options.folder.absolute(), options.methods)
    elif options.what == "counted":
        counted(options.folder.absolute())
    elif options.what == "one":
        one(options.case[0], options.case[1:])
    elif options.what == "simulated":
        for line in simulated(options.folder, options.sizes):
            print(line, flush=True)
    else:
        problem = problem_of(costs_of(Path("runs/plans"), "34B", 32), 32, 0.9 * H100.memory - 3e9)
        found, hand = best(problem), by_hand(problem, symmetric=True)
        assert found is not None
        assert hand is not None
        picture(problem, {"searched": found.plan, "symmetric": hand}, options.folder / "plans.png")


if __name__ == "__main__":
    main()
