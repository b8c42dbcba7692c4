"""Assent as a contender: `contender_assent.py PLAN LINE` runs one line of the benchmark through the usual path.

The run is `assent.assemble.Job`, the same that the command builds, with one more hook that counts steps. Metrics are
recorded as always; evaluation is off, as it is for the peers.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gate import Gate
from plan import Plan, read_rows

from assent import __version__, load_settings, records
from assent.assemble import Job
from assent.loop.checkpoint import Store
from assent.loop.progress import Hook, Moment
from assent.models.load import load_model, load_tokenizer
from assent.monitor.console import Reporter
from assent.rollout.build import build_engine
from assent.rollout.rollouter import completion_seed
from assent.types import Completion, Sampling, Stats


class Measured(Job):
    """A run that reports every step to the gate."""

    gate: Gate
    history: list[Stats]

    def hooks(self, *arguments: Any) -> list[Hook]:
        self.history = []
        return [self.report, *super().hooks(*arguments)]

    async def report(self, moment: Moment) -> Stats:
        self.history.append(dict(moment.stats))
        assert moment.batch is not None
        self.gate.passed(moment.batch.tokens.shape[0])
        return {}


def train(plan: Plan, line: str, gate: Gate) -> None:
    """A training line."""
    optimizer = {"learning_rate": plan.rate(line), "betas": [0.9, 0.95], "schedule": "constant"}
    settings = {
        "name": line,
        "overwrite": True,
        "output": plan.output,
        "device": "cpu",
        "threads": plan.threads,
        "model": {"path": str(plan.path({"sft": "fresh", "reward": "judge"}.get(line, "policy")))},
        "data": {"train": str(plan.path(f"{line}.jsonl")), "shuffle": False},
        "optimizer": optimizer,
        "critic": {"optimizer": optimizer},
        "train": {"steps": gate.total, "batch_size": plan.rows // (2 if line in ("reward", "dpo") else 1)},
        "log": {"quiet": True},
        **online(plan, line),
    }
    loaded = load_settings(settings, method=line)
    folder = records.open_folder(loaded)
    job = Measured(loaded, folder, Store(folder / records.CHECKPOINTS), None, Reporter(quiet=True))
    job.gate = gate
    asyncio.run(job.train([]))
    gate.finish(figures=figures_of(line, job.history, gate), versions=versions())


def figures_of(line: str, history: Sequence[Stats], gate: Gate) -> dict[str, float]:
    """What the peer has too: the loss over the last segment, or reward and length over the run (their losses are
    defined differently)."""
    if line in ("ppo", "grpo"):
        names = {"length": "length/mean"} | ({"reward": "reward/mean"} if line == "grpo" else {})
        return {name: statistics.fmean(stats[key] for stats in history) for name, key in names.items()}
    key = "loss/judge" if line == "reward" else "loss/policy"
    return {"loss": statistics.fmean(stats[key] for stats in history[-gate.steps :])}


def online(plan: Plan, line: str) -> dict[str, Any]:
    """Settings of the methods that sample."""
    if line == "ppo":
        return {
            "rollout": {"prompts_per_step": plan.rows, "max_tokens": plan.max_new_tokens},
            "rewards": [{"kind": "judge", "path": str(plan.path("judge"))}],
            "algorithm": {"epochs": plan.ppo_epochs, "minibatches": 1},
        }
    if line == "grpo":
        function = f"{Path(__file__).with_name('plan.py')}:richness"
        return {
            "rollout": {"prompts_per_step": plan.rows // plan.samples, "max_tokens": plan.max_new_tokens},
            "rewards": [{"kind": "function", "function": function}],
            "algorithm": {"samples": plan.samples, "kl_in_loss": plan.kl_in_loss},
        }
    return {}


def generate(plan: Plan, line: str, gate: Gate) -> None:
    """Answers to all prompts at once, time after time: greedy ones of a fixed length, or sampled ones that end."""
    path = str(plan.path("policy"))
    model, tokenizer = load_model(path), load_tokenizer(path)
    asked = [tuple(tokenizer(row["prompt"])["input_ids"]) for row in read_rows(plan.path("generation.jsonl"))]
    engine = build_engine(model, tokenizer, slots=plan.prompts, copy=False)
    greedy = line == "generation-greedy"
    sampling = Sampling(max_tokens=plan.max_new_tokens)
    if greedy:
        sampling = replace(sampling, temperature=0.0, min_tokens=plan.max_new_tokens)

    async def answer_all(number: int) -> list[Completion]:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for index, tokens in enumerate(asked):
                one = replace(sampling, seed=completion_seed(number, index, 0))
                running.append(tasks.create_task(engine.generate(tokens, [one])))
        return [task.result()[0] for task in running]

    lengths: list[int] = []
    for number in range(gate.total):
        answers = asyncio.run(answer_all(number))
        lengths += [len(answer.tokens) for answer in answers]
        gate.passed(sum(len(answer.tokens) for answer in answers))
    tokens = [answer.tokens for answer in answers] if greedy else []
    gate.finish(figures={"length": statistics.fmean(lengths)}, tokens=tokens, versions=versions())


def versions() -> dict[str, str]:
    return {"assent": __version__, "torch": version("torch"), "transformers": version("transformers")}


def main() -> None:
    plan, line = Plan.read(sys.argv[1]), sys.argv[2]
    gate = Gate(steps=plan.steps(line), repeats=plan.repeats)
    torch.set_num_threads(plan.threads)
    (generate if line.startswith("generation") else train)(plan, line, gate)


if __name__ == "__main__":
    main()
