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

import argparse
import json
import shutil
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import chdir
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

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

    path = lab / f"{task}_{arm}_{seed}.json"
    about = {"source": source(task, seed), "split": split, "recipe": recipe(arm, seed)}
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if record.get("about") == about:
        return dict(record["figures"])
    folder = lab / f"{task}_{seed}"
    with chdir(made(folder, task, seed, split)):
        began, model = time.process_time(), "model.gguf"
        if about["recipe"]:
            model = str(run(about["recipe"]).model)
        trained = time.process_time() - began
        figures = figures_of(model, "shots.jsonl" if arm == "few" else "asked.jsonl") | {"cpu": round(trained, 1)}
        if arm == "warm":  # what the arms after it start from
            shutil.rmtree("warm", ignore_errors=True)
            shutil.copytree(model, "warm")
        if about["recipe"]:
            shutil.rmtree(f"runs/{arm}/checkpoints")
    path.with_suffix(".part").write_text(json.dumps({"about": about, "figures": figures}) + "\n", encoding="utf-8")
    path.with_suffix(".part").replace(path)
    return figures


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
    lab.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as threads:
        asked = [threads.submit(_task, task, seed, lab.resolve()) for seed in SEEDS for task in TASKS]
    for done in asked:
        done.result()


def _task(task: str, seed: int, lab: Path) -> None:
    for arm in ARMS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            figures = process.submit(measured, task, arm, seed, lab).result()
        print(f"{task}, seed {seed}, {arm}: {json.dumps(figures | {'texts': None})}", flush=True)


def found(lab: Path) -> dict[str, dict[str, Record]]:
    """Return figures by task and arm, then seed, as far as they were measured; the commonest answer's among them."""
    kept: dict[str, dict[str, Record]] = {}
    for task, seed in product(TASKS, SEEDS):
        paths = {arm: lab / f"{task}_{arm}_{seed}.json" for arm in ARMS}
        there = {arm: json.loads(path.read_text(encoding="utf-8")) for arm, path in paths.items() if path.exists()}
        for arm, record in there.items():
            kept.setdefault(f"{task}/{arm}", {})[str(seed)] = record["figures"]
        if there:
            kept.setdefault(f"{task}/always", {})[str(seed)] = {"right": commonest(task, seed)}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs go, in its folder gym")
    parser.add_argument("--jobs", type=int, default=2, help="tasks at a time, one thread each")
    given = parser.parse_args()
    measure(given.runs / "gym", jobs=given.jobs)


if __name__ == "__main__":
    main()
