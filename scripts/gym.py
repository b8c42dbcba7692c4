"""GRPO on tasks of reasoning-gym from SmolLM2-135M-Instruct, beside few-shot prompts and SFT on as many questions.

    task, seed -> questions of the splits train and test (plaudit/support/gym.py)
    model -> asked plainly, and after four examples -> SFT on 128 answers -> GRPO
          -> SFT on the same 128, then on answers to as many questions as GRPO asked
          -> of each: the share of right answers to test questions, pass@8, length, CPU time

`python scripts/gym.py` measures, `python scripts/results.py --only gym` writes as well; both need reasoning-gym. An
answer is right if the task's own scorer gives it 1; GRPO is rewarded for that, without partial credit. A figure is kept
as soon as it is measured, and nothing that was measured is run again. Times are a run's CPU seconds, of all threads,
and leave measuring out.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from contextlib import chdir
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import arms

from plaudit.commands import smollm2
from plaudit.data.write import write_rows
from plaudit.support import gym

SEEDS = (1, 2, 3)
"""Of order and samples. Questions are the same but for one or two, since reasoning-gym counts up from its seed.
Settings were tuned on seed 0 and the split `validation`."""
TASKS = {
    "gcd": "max_value=100",
    "letter_counting": "min_words=3&max_words=6",
    "chain_sum": "max_terms=3&max_digits=1",
}
"""Each with its settings: smaller numbers and shorter texts than the package's own, which are beyond this model."""
ARMS = {
    "base": "as it is",
    "few": "as it is, after 4 examples",
    "warm": "SFT on 128 answers",
    "sft": "SFT on 128 + 480 answers",
    "grpo": "SFT on 128 answers, then GRPO on 480 questions",
}
SHORT = ("base", "examples", "SFT 128", "SFT 608", "GRPO")
"""The arms in few letters."""
SHOTS, WARM, ASKED, SAMPLES = 4, 128, 16, 8
STEPS = 30
RATE = 5e-4
ONLINE = 5e-4
TESTED, ANSWERS = 100, 8
"""Test questions, and answers to each, drawn at temperature 1."""
LONGEST = 16
"""Tokens of an answer; a right one is a number of one to three characters."""
SHOWN = 3
Record = dict[str, Any]
MADE_BY: dict[str, Record] = {
    "warm": {"method": "sft", "train": {"epochs": 2, "batch_size": 16}},
    "sft": {"method": "sft", "train": {"epochs": 1, "batch_size": 16}},
    "grpo": {
        "method": "grpo",
        "rewards": [{"kind": "reasoning_gym", "options": {"partial": False}}],
        "algorithm": {"samples": SAMPLES},
        "rollout": {"prompts_per_step": ASKED, "max_tokens": LONGEST},
        "optimizer": {"learning_rate": ONLINE, "warmup": "2 steps"},
        "train": {"steps": STEPS},
    },
}
"""What is particular to the run of an arm that trains."""


def source(task: str, seed: int) -> str:
    return f"{gym.PREFIX}{task}?size={WARM + STEPS * ASKED}&seed={seed}&{TASKS[task]}"


def recipe(arm: str, seed: int) -> dict[str, Any]:
    """Return the settings of the run that makes an arm; {} if it trains nothing. Paths are of the seed's folder."""
    if arm not in MADE_BY:
        return {}
    shared: dict[str, Any] = {
        "name": arm,
        "seed": seed,
        "threads": 1,
        "overwrite": True,
        "model": {"path": "model.gguf" if arm == "warm" else "warm", "lora": {"rank": 16}},
        "data": {"train": f"{'warm' if arm == 'warm' else 'rest'}.jsonl", "max_prompt_tokens": 128, "max_tokens": 160},
        "optimizer": {"learning_rate": RATE, "warmup": "2 steps"},
        "log": {"quiet": True, "page": False, "samples_megabytes": 0},
        "save": {"every": None},
    }
    return shared | MADE_BY[arm]


def measured(task: str, arm: str, seed: int, lab: Path, split: str = "test") -> Record:
    """Train what an arm trains, and measure it: its figures, kept in a file. What was measured is not run again."""
    from plaudit import run

    about = {"source": source(task, seed), "split": split, "recipe": recipe(arm, seed)}

    def figures() -> Record:
        with chdir(made(lab / f"{task}_{seed}", task, seed, split)):
            began, model = time.process_time(), "model.gguf"
            if about["recipe"]:
                model = str(run(about["recipe"]).model)
            trained = time.process_time() - began
            kept = figures_of(model, "shots.jsonl" if arm == "few" else "asked.jsonl") | {"cpu": round(trained, 1)}
            if arm == "warm":  # what the arms after it start from
                shutil.rmtree("warm", ignore_errors=True)
                shutil.copytree(model, "warm")
            if about["recipe"]:
                shutil.rmtree(f"runs/{arm}/checkpoints")
        return kept

    return arms.once(arms.place_of(lab, task, arm, seed), about, figures)


def made(folder: Path, task: str, seed: int, split: str) -> Path:
    """Write a seed's questions and link the model, unless they are there. Return the folder."""
    if not (folder / "model.gguf").is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        name = source(task, seed)
        train, test = list(gym.questions(name, "train")), list(islice(gym.questions(name, split), TESTED))
        asked = (("user", "prompt"), ("assistant", "answer"))
        shots = [said(role, row[column]) for row in train[:SHOTS] for role, column in asked]
        after = [row | {"prompt": [*shots, said("user", row["prompt"])]} for row in test]
        files = {"warm": train[:WARM], "rest": train[WARM:], "asked": test, "shots": after}
        for file, rows in files.items():
            write_rows(folder / f"{file}.jsonl", rows)
        (folder / "model.gguf").symlink_to(smollm2.fetched())
    return folder


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def figures_of(model: str, prompts: str) -> Record:
    """Answer the test questions, and return the figures of the answers, with the first ones."""
    from plaudit.data.settings import DataSettings
    from plaudit.evaluate.bench import Bench
    from plaudit.evaluate.generation import generation_figures, pass_figures
    from plaudit.evaluate.settings import BeforeAfterSettings, SamplingSettings
    from plaudit.monitor.console import Reporter

    asked = BeforeAfterSettings(
        gold="plaudit.support.gym:score",
        gold_options={"partial": False},
        prompts=prompts,
        data=DataSettings(max_prompt_tokens=1024),
        sampling=SamplingSettings(max_tokens=LONGEST, samples=ANSWERS),
        threads=1,
    )
    bench = Bench(asked, Reporter(quiet=True))
    answers = bench.scored_answers(bench.policy(model), None, name="answers")
    passing, others = pass_figures(answers, ["gold"], [1, ANSWERS], least=1), generation_figures(answers)
    once, often = (passing[f"pass@{k}/gold"] for k in (1, ANSWERS))
    found = {"right": once.value, "low": once.low, "high": once.high, "pass": often.value}
    found |= {"length": others["length"].value, "unfinished": others["unfinished"].value}
    texts = [[group[0].prompt.text, group[0].completion.text] for group in answers[:SHOWN]]
    return {name: round(value, 4) for name, value in found.items()} | {"questions": len(answers), "texts": texts}


def commonest(task: str, seed: int) -> float:
    """Share of test questions that the commonest answer to training questions is right for: what a policy has that
    always says the same."""
    train, test = (gym.questions(source(task, seed), split) for split in ("train", "test"))
    always = Counter(row["answer"] for row in train).most_common(1)[0][0]
    return round(fmean(row["answer"] == always for row in islice(test, TESTED)), 4)


def measure(lab: Path, *, jobs: int) -> None:
    """Measure every arm of every task and seed, as far as it was not yet: `jobs` tasks at a time, a process an arm."""
    arms.measure(measured, dict.fromkeys(TASKS, tuple(ARMS)), SEEDS, lab, jobs=jobs)


def found(lab: Path) -> dict[str, dict[str, Record]]:
    """Return figures by task and arm, then seed, as far as they were measured; the commonest answer's among them."""
    kept = arms.found(dict.fromkeys(TASKS, tuple(ARMS)), SEEDS, lab)
    there = {(one.partition("/")[0], seed) for one, seeds in kept.items() for seed in seeds}
    for task, seed in sorted(there):
        kept.setdefault(f"{task}/always", {})[seed] = {"right": commonest(task, int(seed))}
    return kept


if __name__ == "__main__":
    arms.command(__doc__, "gym", measure)
