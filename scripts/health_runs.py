"""Record healthy and sick runs for the rules of health: `python scripts/health_runs.py FOLDER [--reuse] [--fresh]`.

    demo data -> sft, judge -> the recipes of configs/ and truly wrong ones -> metrics.jsonl
    -> tests/monitor/health/{healthy,sick}.jsonl -> the table of docs/health.md

Runs that FOLDER holds already are not made again; `--reuse` makes none. It takes about three quarters of an hour on one
core. Only the idle rollout runs on Ray, since in one process sampling and learning take turns.

Limits were set on these runs. `--fresh`, with another FOLDER, records healthy ones that no limit was set on, with data
and models of another seed, as fresh.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve()
RECORDED = ROOT / "tests" / "monitor" / "health"
PAGE = ROOT / "docs" / "health.md"

ONLINE = ("ppo", "grpo", "rloo", "remax", "reinforce", "online_dpo", "best_of_k")
OFFLINE = ("dpo", "kto", "orpo", "simpo")
VARIANTS = ("dapo", "dr_grpo", "gspo", "reinforce_baseline")
SHORT = ("train.steps=35",)
FEW = ("train.steps=60", "evaluate.every=30")
QUICK = ("train.steps=24",)
SMALL = ("train.steps=30", "train.batch_size=16", "evaluate.limit=16", "data.limit=1500")
PROMPTS = dict.fromkeys(VARIANTS, 16)
PROMPTS |= {"ppo": 64, "grpo": 16, "rloo": 32, "remax": 64, "reinforce": 128, "online_dpo": 64, "best_of_k": 64}
PROMPTS |= {"distill": 64}
"""Prompts of a step in the recipes. Sick runs take half of them, healthy ones three eighths: figures are noisier."""


def rewarded(*functions: str, judge: float | None = None, gold: bool = True) -> str:
    """An override that replaces a recipe's rewards by functions of this file."""
    named = [f'{{kind: function, name: {name}, function: "{HERE}:{name}"}}' for name in functions]
    if judge is not None:
        named.insert(0, f"{{kind: judge, path: runs/reward, weight: {judge}}}")
    if gold:
        named.append('{kind: function, function: "plaudit.tasks.demo:gold_reward", name: gold, weight: 0}')
    return f"rewards=[{', '.join(named)}]"


TOOLS = (
    "model.path=runs/sft_calls",
    "data.train=data/games/prompts.jsonl",
    "data.chat_template=default",
    f"environment={{function: {HERE}:Guess, max_turns: 6, max_tokens: 400}}",
    "rewards=[environment]",
    "rollout.prompts_per_step=8",
    "rollout.max_tokens=40",
    "optimizer.learning_rate=1.0e-4",
)
"""GRPO on a game that a tool plays, from a model of its own."""
GAMES = Path("data/games")
PLAYER = (
    "model.config.n_positions=1024",
    f"model.tokenizer={GAMES / 'tokenizer'}",
    "data.validation=null",
    "data.chat_template=default",
    "data.every_turn=true",
    "data.max_prompt_tokens=400",
    "data.max_tokens=700",
    "train.epochs=6",
)
LONG = ("rollout.max_tokens=96", "data.max_prompt_tokens=32")
HEALTHY: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, SMALL) for name in OFFLINE},
    "sft": ("sft", SMALL),
    "reward": ("reward", SMALL),
    **{name: (name, QUICK) for name in ONLINE},
    "distill": ("distill", (*QUICK, "reference.path=runs/grpo_0")),
}
"""Name -> recipe of configs/, overrides. Each for every seed."""
ONCE: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, QUICK) for name in VARIANTS},
    "grpo_long": ("grpo", (*QUICK, *LONG, rewarded("thorough", judge=0.5))),
    "rloo_long": ("rloo", (*QUICK, *LONG, rewarded("thorough", gold=False))),
    "grpo_lag": ("grpo", (*QUICK, "rollout.max_lag=1")),
    "grpo_tools": ("grpo", (*QUICK, *TOOLS)),
}
"""Further healthy runs, of one seed."""
FRESH = {name: HEALTHY[name] for name in (*OFFLINE, "sft", "reward", "ppo", "grpo", "rloo", "remax")}
FRESH_SEED = 11
"""Seed of the fresh runs, of their data, their SFT model and their judge."""

SICK: dict[str, tuple[str, tuple[str, ...], str]] = {
    "entropy": (
        "reinforce",
        (*SHORT, "optimizer.learning_rate=1e-2", "algorithm.kl_coefficient=0"),
        "rate x 30, no KL",
    ),
    "kl": ("rloo", (*SHORT, "optimizer.learning_rate=3e-3", "algorithm.kl_coefficient=0"), "rate x 10, no KL"),
    "hacking": (
        "grpo",
        ("train.steps=60", "algorithm.kl_in_loss=0", "rewards.0.path=runs/bad_judge"),
        "no KL, a judge of 20 steps",
    ),
    "length": (
        "grpo",
        (*SHORT, *LONG, rewarded("wordy"), "algorithm.kl_in_loss=0", "optimizer.learning_rate=1e-3"),
        "a reward that counts words, no KL",
    ),
    "unfinished": ("grpo", (*SHORT, "rollout.max_tokens=10", "shaping.unfinished=score"), "room for ten tokens"),
    "turns": ("grpo", (*QUICK, *TOOLS, "environment.max_turns=1"), "room for one turn of a game"),
    "no_calls": (
        "grpo",
        (*QUICK, *TOOLS, "model.path=runs/sft_words"),
        "a policy that plays a tool's game in words",
    ),
    "bad_calls": ("grpo", (*QUICK, *TOOLS, f"environment.function={HERE}:Broken"), "a tool that always raises"),
    "equal_groups": ("grpo", ("train.steps=15", rewarded("constant")), "a reward that is always 1"),
    "empty": (
        "grpo",
        ("train.steps=15", "algorithm.dynamic_sampling=true", "rollout.prompts_per_step=4", rewarded("constant")),
        "the same with dynamic sampling",
    ),
    "clipping": (
        "ppo",
        (*SHORT, "optimizer.learning_rate=1.5e-2", "algorithm.epochs=4", "algorithm.minibatches=4"),
        "rate x 30, four epochs",
    ),
    "sampler": (
        "grpo",
        (*SHORT, "optimizer.learning_rate=3e-3", "rollout.max_lag=6", "algorithm.kl_in_loss=0"),
        "rate x 10, six versions of lag",
    ),
    "outage": ("grpo", ("train.steps=15", rewarded("flaky")), "a reward that is away for two seconds"),
    "failed_rewards": (
        "grpo",
        ("train.steps=20", rewarded("brittle")),
        "a reward that fails on three answers of a hundred",
    ),
    "starving": (
        "grpo",
        ("train.steps=15", "rollout.prompts_per_step=4", "rollout.max_lag=1", rewarded("sleepy")),
        "a reward that sleeps",
    ),
    "idle_rollout": (
        "grpo",
        (
            "train.steps=14",
            "rollout.prompts_per_step=4",
            "rollout.max_lag=1",
            "algorithm.epochs=12",
            "runtime.kind=ray",
        ),
        "12 epochs a step beside one rollout worker",
    ),
    "critic": (
        "ppo",
        (*SHORT, "critic.learning_rate=1e-12", "critic.path=runs/sft", "algorithm.minibatches=1"),
        "critic's rate 0",
    ),
    "idle_reward": (
        "rloo",
        ("train.steps=60", "algorithm.kl_coefficient=0", "optimizer.learning_rate=1e-3", rewarded("noise")),
        "a reward that is noise",
    ),
    "centring": (
        "ppo",
        ("train.steps=30", "algorithm.whiten_advantages=false", "shaping.shift=5", "critic.learning_rate=1e-6"),
        "rewards 5 too high, no whitening",
    ),
    "skipped": ("rloo", ("train.steps=10", "shaping.scale=1e30"), "rewards times 1e30"),
    "halted": (
        "ppo",
        (*SHORT, "optimizer.learning_rate=1.5e-2", "algorithm.minibatches=8", "algorithm.early_stop_ratio=1.01"),
        "rate x 30, early stop at 1.01",
    ),
    "loss": ("dpo", (*FEW, "optimizer.learning_rate=1e-2"), "rate x 100"),
}
"""Name -> recipe of configs/, overrides, what is wrong in words. Seed 0."""


def thorough(completion: str) -> float:
    """Wants answers of 40 words."""
    return min(len(completion.split()), 40) / 40


def wordy(completion: str) -> float:
    return len(completion.split()) / 10


def constant(completion: str) -> float:
    return 1.0


def noise(completion: str) -> float:
    return random.Random(completion).gauss(0, 1)


BEGAN: list[float] = []


def flaky(completion: str) -> float:
    """Is away for two seconds, four seconds after the first call."""
    BEGAN.append(time.monotonic())
    if 4 < BEGAN[-1] - BEGAN[0] < 6:
        raise ConnectionError("the server is away")
    return noise(completion)


def brittle(completion: str) -> float:
    words = completion.split()
    if random.Random(completion).random() < 0.03:
        raise ValueError("no answer found")
    return words.count("good") + noise(completion)


def sleepy(completion: str) -> float:
    time.sleep(0.2)
    return noise(completion)


class Guess:
    """A game with a number from 1 to 7."""

    guesses = 0

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, 7)
        return "Guess my number. It is from 1 to 7."

    def guess(self, number: int) -> Any:
        """Say whether the number is right.

        Args:
            number: From 1 to 7.
        """
        from plaudit import Turn

        self.guesses += 1
        if number == self.number:
            return Turn(done=True, reward=1 / self.guesses)
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return 0.0


class Broken(Guess):
    def guess(self, number: int) -> Any:
        raise ValueError("this tool is out of order")

    guess.__doc__ = Guess.guess.__doc__  # which the prompt shows


def make_games(folder: Path, *, seed: int) -> None:
    """Write random games, with calls of the tool and in words, prompts, and a tokenizer."""
    from transformers.utils.chat_template_utils import get_json_schema

    from plaudit.data.byte_pairs import train_tokenizer
    from plaudit.data.write import write_rows

    rng, tools = random.Random(seed), [get_json_schema(Guess().guess)]
    played = [[rng.randint(1, 7) for _ in range(5)] for _ in range(1500)]  # the number, then guesses
    rows = [{"messages": game(*numbers, calls=calls), "tools": tools} for calls in (True, False) for numbers in played]
    write_rows(folder / "calls.jsonl", rows[: len(played)])
    write_rows(folder / "words.jsonl", rows[len(played) :])
    write_rows(folder / "prompts.jsonl", [{"prompt": [{"role": "user", "content": ""}]}] * len(played))
    train_tokenizer(map(json.dumps, rows), folder / "tokenizer", vocabulary=400)


def game(number: int, *guesses: int, calls: bool) -> list[dict[str, Any]]:
    """The chat of a game that makes these guesses until one is right, by calls of the tool or in words."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": Guess().reset(0)}]
    made = guesses[: guesses.index(number) + 1] if number in guesses else guesses
    for turn, guess in enumerate(made):
        if turn:
            hint = "higher" if made[turn - 1] < number else "lower"
            chat.append({"role": "tool" if calls else "user", "content": hint})
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": guess}}}
        said = {"content": "", "tool_calls": [call]} if calls else {"content": str(guess)}
        chat.append({"role": "assistant", **said})
    return chat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0 on")
    parser.add_argument("--only", nargs="*", help="make only runs with one of these words in their names")
    parser.add_argument("--reuse", action="store_true", help="make no runs: record those that are there")
    parser.add_argument("--fresh", action="store_true", help="make the runs that no limit was set on")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not arguments.reuse:
        make(arguments)
    record(folder, fresh=arguments.fresh)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def make(arguments: argparse.Namespace) -> None:
    """Make all runs that are not there yet."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    prepare(arguments.folder.resolve(), seed=FRESH_SEED if arguments.fresh else 0)
    planned = [(f"sick_{name}", recipe, overrides, 0) for name, (recipe, overrides, _) in SICK.items()]
    for seed in range(arguments.seeds):
        planned += [(f"{name}_{seed}", recipe, overrides, seed) for name, (recipe, overrides) in HEALTHY.items()]
    planned += [(f"{name}_0", recipe, overrides, 0) for name, (recipe, overrides) in ONCE.items()]
    if arguments.fresh:
        planned = [(f"{name}_{FRESH_SEED}", *made, FRESH_SEED) for name, made in FRESH.items()]
    for name, recipe, overrides, seed in planned:
        if not arguments.only or any(word in name for word in arguments.only):
            attempt(name, recipe, overrides, seed)


def prepare(folder: Path, *, seed: int) -> None:
    """Make the demo's data, an SFT model and two judges, and go to their folder, for the recipes' paths to hold."""
    from plaudit.tasks.demo import make_demo

    os.chdir(folder)
    if not Path("data/demo/about.json").exists():
        make_demo(Path("data/demo"), seed=seed)
    attempt("sft", "sft", (), seed)
    attempt("reward", "reward", (), seed)
    if not (GAMES / "tokenizer").exists():
        make_games(GAMES, seed=seed)
    attempt("sft_calls", "sft", (*PLAYER, f"data.train={GAMES}/calls.jsonl"), seed)
    attempt("sft_words", "sft", (*PLAYER, f"data.train={GAMES}/words.jsonl"), seed)
    attempt("bad_judge", "reward", ("train.steps=20", "data.limit=300"), seed)


def attempt(name: str, recipe: str, overrides: tuple[str, ...], seed: int) -> None:
    """Make one run, unless it is there. A sick one may end with an error."""
    from plaudit import load_settings, run
    from plaudit.loop.finite import NonFiniteError

    done = Path("runs") / name / "done"
    if done.exists():
        return
    prompts = PROMPTS.get(recipe, 0) * (4 if name.startswith("sick_") else 3) // 8
    fewer = (f"rollout.prompts_per_step={prompts}",) if prompts else ()
    fixed = (f"name={name}", f"seed={seed}", "overwrite=true", "threads=1", "log.quiet=true", "log.page=false")
    began, ended = time.monotonic(), ""
    try:
        run(
            load_settings(
                str(ROOT / "configs" / f"{recipe}.yaml"), [*fewer, *overrides, *fixed, "log.samples_megabytes=0"]
            )
        )
    except NonFiniteError as error:
        ended = f": {error!s:.150}"
    done.touch()
    print(f"seed {seed}, {name}: {time.monotonic() - began:.0f} s{ended}", flush=True)


def record(folder: Path, *, fresh: bool) -> None:
    """Write the figures that rules read of all finished runs."""
    from plaudit.monitor.rules import RULES

    read = {name for rule in RULES for name in rule.reads}
    healthy = {name: (*made, "") for name, made in (FRESH if fresh else HEALTHY | ONCE).items()}
    lines: dict[bool, list[str]] = {True: [], False: []}
    for path in sorted(folder.glob("runs/*/metrics.jsonl")):
        whole = path.parent.name
        sick = whole.startswith("sick_")
        name = whole.removeprefix("sick_") if sick else whole.rpartition("_")[0]
        planned = SICK if sick else healthy
        if name not in planned or not (path.parent / "done").exists():
            continue
        recipe, overrides, wrong = planned[name]
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        broken = {key for one in records for key, value in one.items() if value is None}
        columns = {key: column([one.get(key, "") for one in records]) for key in sorted(read | broken)}
        known = {key: values for key, values in columns.items() if values != ""}
        about = {"name": whole.removeprefix("sick_"), "recipe": recipe, "steps": len(records)}
        about |= {"overrides": [one.replace(f"{ROOT}/", "") for one in overrides]} | ({"wrong": wrong} if sick else {})
        lines[sick].append(json.dumps(about | {"figures": known}, separators=(",", ":")) + "\n")
    RECORDED.mkdir(exist_ok=True)
    for sick, name in ((False, "fresh.jsonl"),) if fresh else ((True, "sick.jsonl"), (False, "healthy.jsonl")):
        (RECORDED / name).write_text("".join(lines[sick]), encoding="utf-8")


def column(values: list[Any]) -> Any:
    """A figure's values with four digits; one value if all are the same. "" stands for none, null for one that is not
    finite."""
    short = [float(f"{value:.4g}") if isinstance(value, float | int) else value for value in values]
    return short[0] if all(value == short[0] for value in short) else short


def recorded(name: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What each run of a file was, and its metrics, a record a step."""
    for line in (RECORDED / name).read_text(encoding="utf-8").splitlines():
        about = json.loads(line)
        figures = {k: v if isinstance(v, list) else [v] * about["steps"] for k, v in about.pop("figures").items()}
        steps = range(about["steps"])
        yield about, [{"step": i + 1} | {k: v[i] for k, v in figures.items() if v[i] != ""} for i in steps]


def caught(records: list[dict[str, Any]]) -> dict[str, int]:
    """Each sign that warns in a run, with the step of its first warning."""
    from plaudit.monitor.health import Health

    health, first = Health(), dict[str, int]()
    for one in records:
        for alarm in health.alarms(one):
            first.setdefault(alarm.sign, one["step"])
    return first


def with_table(page: str) -> str:
    """The page with the table of rules and of the runs that they caught."""
    from plaudit.monitor.rules import RULES

    runs = {about["name"].replace("_", " "): (about, caught(records)) for about, records in recorded("sick.jsonl")}
    rows = ["| sign | warns when | sick run | caught at step |", "|---|---|---|---:|"]
    for rule in RULES:
        about, first = runs[rule.name]
        run, when = f"{about['recipe']}: {about['wrong']}", f"{first[rule.name]} of {about['steps']}"
        rows.append(f"| {rule.name} | {rule.when} | {run} | {when} |")
    head, _, rest = page.partition("<!-- table -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    return "\n".join([f"{head}<!-- table -->", *rows, f"<!-- end -->\n{tail}"])


if __name__ == "__main__":
    main()
