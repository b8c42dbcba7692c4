"""Episodes that are learned: SmolLM2 takes a calculator to sums that it cannot do, a fresh model guesses numbers.

    seed -> questions, played examples -> SFT on the examples -> GRPO in the environment
         -> of each: right answers or guesses a game, calls that can be read, CPU time

`python scripts/episodes.py` measures, `python scripts/results.py --only episodes` writes as well. A figure is kept as
soon as it is measured, and nothing that was measured is run again. Times are a run's CPU seconds, of all threads, and
leave measuring out.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import arms

from plaudit.commands import smollm2
from plaudit.data.write import write_rows

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)
"""Of data, weights of the fresh model, order and samples. Settings were chosen on seed 0, on other test questions."""
TOOL = f"{ROOT}/examples/environments/calculator.py:calculate"
GAME = f"{ROOT}/examples/environments/guess.py:Guess"
RIGHT = "plaudit.tasks.stories:right"
HIGHEST, TRIES = 7, 8
OPTIMAL = 17 / 7
"""Mean guesses of halving 1 to 7: one number at the first guess, two at the second, four at the third."""
ARMS = {"plain": "as it is, without the tool", "base": "as it is", "sft": "SFT on examples", "grpo": "SFT, then GRPO"}
SHORT = {"plain": "no tool", "base": "the tool", "sft": "SFT", "grpo": "GRPO"}
"""The arms in few letters."""
TASKS = {"calculator": ("plain", "base", "sft", "grpo"), "guess": ("sft", "grpo")}
TESTED = {"calculator": 128, "guess": 400}
EXAMPLES = {"calculator": 32, "guess": 8000}
Record = dict[str, Any]
QUIET: Record = {
    "threads": 1,
    "overwrite": True,
    "log": {"quiet": True, "page": False, "samples_megabytes": 0},
    "save": {"every": None},
}
CALCULATOR: Record = {"tools": [TOOL], "max_turns": 3, "max_tokens": 192}
GUESS: Record = {"function": GAME, "options": {"highest": HIGHEST}, "max_turns": TRIES, "max_tokens": 200}
PLAYED: Record = {"calculator": CALCULATOR, "guess": GUESS}
OWN: Record = {"as_chat": True, "max_prompt_tokens": 320}
CHATS: Record = {**OWN, "chat_template": "default"}
"""Chats in the model's own template, and in ours, which knows tools; that of SmolLM2 does not."""
FRESH: Record = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
MADE_BY: dict[str, dict[str, Record]] = {
    "calculator": {
        "sft": {
            "method": "sft",
            "model": {"path": "model.gguf", "lora": {"rank": 16}},
            "data": {"train": "played.jsonl", "every_turn": True, "max_tokens": 512},
            "optimizer": {"learning_rate": 1e-3, "warmup": "2 steps"},
            "train": {"epochs": 3, "batch_size": 8},
        },
        "grpo": {
            "method": "grpo",
            "model": {"path": "sft", "lora": {"rank": 16}},
            "data": {"train": "prompts.jsonl"},
            "environment": CALCULATOR,
            "rewards": [{"kind": "function", "name": "right", "function": RIGHT}],
            "algorithm": {"samples": 8},
            "rollout": {"prompts_per_step": 6, "max_tokens": 48},
            "optimizer": {"learning_rate": 2e-4, "warmup": "2 steps"},
            "train": {"steps": 16},
        },
    },
    "guess": {
        "sft": {
            "method": "sft",
            "model": {"config": FRESH, "tokenizer": "tokenizer"},
            "data": {"train": "played.jsonl", "every_turn": True, "max_tokens": 400},
            "optimizer": {"learning_rate": 2e-3, "warmup": 0.05},
            "train": {"epochs": 4, "batch_size": 32},
        },
        "grpo": {
            "method": "grpo",
            "model": {"path": "sft"},
            "data": {"train": "prompts.jsonl"},
            "environment": GUESS,
            "rewards": ["environment"],
            "algorithm": {"samples": 8, "scale_rewards": False, "entropy_bonus": 0.002},
            "rollout": {"prompts_per_step": 32, "max_tokens": 4, "slots": 256},
            "optimizer": {"learning_rate": 1e-3, "warmup": "5 steps"},
            "train": {"steps": 120},
        },
    },
}
"""The runs of the arms that train."""


def recipe(task: str, arm: str, seed: int) -> Record:
    """Return the settings of the run that makes an arm; {} if it trains nothing. Paths are of the seed's folder."""
    if arm not in MADE_BY[task]:
        return {}
    own = MADE_BY[task][arm]
    return {**QUIET, "name": arm, "seed": seed, **own, "data": {**CHATS, **own["data"]}}


def measured(task: str, arm: str, seed: int, lab: Path) -> Record:
    """Train what an arm trains, and measure it: its figures, kept in a file. What was measured is not run again."""
    from plaudit import run

    settings = recipe(task, arm, seed)

    def figures() -> Record:
        with chdir(made(lab / f"{task}_{seed}", task, seed)):
            began, model = time.process_time(), "model.gguf"
            if settings:
                model = str(run(settings).model)
            trained = time.process_time() - began
            kept = figures_of(task, model, plain=arm == "plain") | {"cpu": round(trained, 1)}
            if arm == "sft":  # what GRPO starts from
                shutil.rmtree("sft", ignore_errors=True)
                shutil.copytree(model, "sft")
            if settings:
                shutil.rmtree(f"runs/{arm}/checkpoints")
        return kept

    about = {"recipe": json.loads(json.dumps(settings).replace(str(ROOT), ""))}
    return arms.once(arms.place_of(lab, task, arm, seed), about, figures)


def made(folder: Path, task: str, seed: int) -> Path:
    """Write a seed's questions and examples, unless they are there. Return the folder."""
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (make_sums if task == "calculator" else make_games)(folder, random.Random(seed))
    return folder


def make_sums(folder: Path, rng: random.Random) -> None:
    """Sums of a product and a number, above 0 and of up to five digits, and examples of calls that compute them."""
    from transformers.utils.chat_template_utils import get_json_schema

    from plaudit.support.plugins import load_object

    calculate = load_object(TOOL)
    tools, asked = [get_json_schema(calculate)], dict[str, str]()
    shown, tested = EXAMPLES["calculator"], TESTED["calculator"]
    while len(asked) < 1000:
        expression = f"{rng.randint(32, 99)} * {rng.randint(32, 99)} {rng.choice('+-')} {rng.randint(100, 999)}"
        asked[expression] = calculate(expression)
    rows = [{"prompt": f"What is {expression}?", "answer": answer} for expression, answer in asked.items()]
    played = []
    for row, (expression, answer) in zip(rows[:shown], asked.items(), strict=False):
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
        chat: list[Record] = [{"role": "user", "content": row["prompt"]}]
        chat += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
        played.append({"messages": [*chat, {"role": "assistant", "content": f"It is {answer}."}], "tools": tools})
    write_rows(folder / "played.jsonl", played)
    write_rows(folder / "test.jsonl", rows[shown : shown + tested])
    write_rows(folder / "prompts.jsonl", rows[shown + tested :])
    (folder / "model.gguf").symlink_to(smollm2.fetched())


def make_games(folder: Path, rng: random.Random) -> None:
    """Games of a poor player as examples; prompts, which differ in their seeds alone; a tokenizer."""
    from plaudit.data.byte_pairs import train_tokenizer

    games = [[*game(rng)] for _ in range(EXAMPLES["guess"])]
    write_rows(folder / "played.jsonl", ({"messages": chat} for chat in games))
    prompts = [{"prompt": "Let us play. Say a number, and nothing else."}] * 2000
    write_rows(folder / "prompts.jsonl", prompts)
    write_rows(folder / "test.jsonl", prompts[: TESTED["guess"]])
    train_tokenizer((turn["content"] for chat in games for turn in chat), folder / "tokenizer", vocabulary=300)


def game(rng: random.Random) -> Iterator[Record]:
    """A game whose player, half of the time, says any number, and otherwise any one that is still possible."""
    from plaudit import Turn
    from plaudit.support.plugins import load_object

    own = load_object(GAME)(highest=HIGHEST)
    asked = f"Let us play. Say a number, and nothing else.\n{own.reset(rng.getrandbits(32))}"
    yield {"role": "user", "content": asked}
    least, most = 1, HIGHEST
    for turn in range(TRIES):
        guess = rng.randint(1, HIGHEST) if rng.random() < 0.5 else rng.randint(least, most)
        said = {"role": "assistant", "content": str(guess)}
        yield said
        told = own.step(said)
        if isinstance(told, Turn) or turn + 1 == TRIES:
            return
        least, most = (max(least, guess + 1), most) if "higher" in told else (least, min(most, guess - 1))
        yield {"role": "user", "content": told}


def figures_of(task: str, model: str, *, plain: bool) -> Record:
    """Play the test questions once each, at temperature 1; return the figures of the episodes, with the first chats."""
    from plaudit.evaluate.bench import Bench
    from plaudit.evaluate.settings import BeforeAfterSettings
    from plaudit.evaluate.statistics import mean_interval
    from plaudit.monitor.console import Reporter
    from plaudit.settings.recipes import load_tree

    asked: Record = {
        "gold": RIGHT if task == "calculator" else None,
        "prompts": "test.jsonl",
        "limit": TESTED[task],
        "data": OWN if plain else CHATS,
        "environment": {} if plain else PLAYED[task],
        "sampling": {"max_tokens": MADE_BY[task]["grpo"]["rollout"]["max_tokens"]},
        "threads": 1,
    }
    bench = Bench(load_tree(BeforeAfterSettings, asked), Reporter(quiet=True))
    answers = [group[0] for group in bench.scored_answers(bench.policy(model), None, name="answers")]
    counts = [dict(one.completion.episode.counts) if one.completion.episode else {} for one in answers]
    if task == "calculator":
        value = mean_interval([one.scores["gold"].value for one in answers])
    else:
        value = mean_interval([one["turns"] for one in counts])
    found: Record = {"value": value.value, "low": value.low, "high": value.high}
    found |= {
        name: sum(one.get(name, 0) for one in counts) / len(counts) for name in ("turns", "calls", "unread_calls")
    }
    found["unfinished"] = sum(not one.completion.finished for one in answers) / len(answers)
    texts = [one.completion.episode.messages if one.completion.episode else one.completion.text for one in answers[:3]]
    return {name: round(value, 4) for name, value in found.items()} | {"questions": len(answers), "texts": texts}


def measure(lab: Path, *, jobs: int) -> None:
    """Measure every arm of both tasks and each seed, as far as it was not yet: `jobs` at a time, a process an arm."""
    arms.measure(measured, TASKS, SEEDS, lab, jobs=jobs)


def found(lab: Path) -> dict[str, dict[str, Record]]:
    """Return figures by task and arm, then seed, as far as they were measured."""
    return arms.found(TASKS, SEEDS, lab)


if __name__ == "__main__":
    arms.command(__doc__, "episodes", measure)
