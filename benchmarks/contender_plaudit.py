"""Plaudit as a contender: `contender_plaudit.py TASK` runs one line of the benchmark through the usual path.

A training line is `plaudit.run`, what the command runs, with a hook that counts steps. Metrics are recorded as always;
evaluation is off, as it is for the peers.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from anatomy import AGAIN, DRAWING, Tracer
from gate import Gate
from harness import versions
from task import SAID, Task, begin, read_rows
from torch.autograd.profiler import record_function

from plaudit import SettingsError, __version__, load_settings, run
from plaudit.executors import local
from plaudit.loop.progress import Moment
from plaudit.models.load import load_model, load_tokenizer
from plaudit.models.lora import save_lora
from plaudit.rollout import native
from plaudit.rollout.build import build_engine
from plaudit.rollout.decode import steps
from plaudit.rollout.native import NativeEngine
from plaudit.rollout.rollouter import completion_seed
from plaudit.types import Completion, Sampling, Stats

VERSIONS = {"plaudit": __version__, **versions()}


class Counted:
    """A hook that reports every step to the gate, and keeps what the figures need. `saves`: as of `Task`."""

    def __init__(self, gate: Gate, tracer: Tracer, *, saves: bool):
        self.gate, self.tracer, self.saves = gate, tracer, saves
        self.policy: Any = None
        self.history: list[Stats] = []
        self.tokens = self.squares = 0

    async def __call__(self, moment: Moment) -> Stats:
        self.history.append(dict(moment.stats))
        assert moment.batch is not None
        lengths = moment.batch.lengths.tolist()
        self.tokens += sum(lengths)
        self.squares += sum(length**2 for length in lengths)
        self.tracer.end(self.gate.done + 1)
        if self.saves and (self.gate.done + 1) % self.gate.steps == 0:
            save_lora(self.policy, Path("adapter"))
        self.gate.passed(sum(lengths))
        self.tracer.begin(self.gate.done)
        return {}

    def engine(self, policy: Any, *arguments: Any, **more: Any) -> Any:
        """Build the engine, and keep the policy, whose parameters it shares with the learner."""
        self.policy = policy
        return build_engine(policy, *arguments, **more)

    def figures(self, method: str) -> dict[str, float]:
        """What the peer has too: the loss over the last segment, or reward and length over the run (the online
        methods' losses are defined differently); and the length of a row that a token finds itself in."""
        found = {"token_length": self.squares / self.tokens}
        if method in ("sft", "reward", "dpo"):
            key = "loss/judge" if method == "reward" else "loss/policy"
            return found | {"loss": statistics.fmean(stats[key] for stats in self.history[-self.gate.steps :])}
        found["length"] = statistics.fmean(stats["length/mean"] for stats in self.history)
        if method != "ppo":
            found["reward"] = statistics.fmean(stats["reward/mean"] for stats in self.history)
        return found


def train(task: Task, gate: Gate, tracer: Tracer) -> None:
    """A training line."""
    pairs = task.method in ("reward", "dpo")
    path = str(task.path({"sft": "fresh", "reward": "judge"}.get(task.method, "policy")))
    chats = not isinstance(read_rows(task.data)[0]["prompt"], str)  # a checkpoint with a chat template would make some
    optimizer = {"learning_rate": task.learning_rate, "betas": [0.9, 0.95], "schedule": "constant"}
    settings = {
        "name": "plaudit",
        "overwrite": True,
        "output": task.output,
        "device": "cpu",
        "threads": task.threads,
        "seed": task.seed,
        "model": {"path": path, "lora": {"rank": task.lora}},
        "data": {"train": task.data, "shuffle": False, "bad_rows": 0, "as_chat": chats},
        "optimizer": optimizer,
        "train": {"steps": task.total_steps, "batch_size": task.rows // (2 if pairs else 1)},
        "save": {"every": None},
        "log": {"quiet": True},
        **online(task, optimizer),
    }
    try:
        loaded = load_settings({**settings, **in_precision(task)}, method=task.method)
    except SettingsError as error:
        gate.refuse(str(error))
    counted = Counted(gate, tracer, saves=task.saves)
    local.build_engine = counted.engine
    run(loaded, hooks=[counted])
    gate.finish(figures=counted.figures(task.method), versions=VERSIONS, profile=tracer.result)


def in_precision(task: Task) -> dict[str, Any]:
    """Settings that differ from float32's."""
    return {} if task.precision == "fp32" else {"learn": {"precision": task.dtype}}


def online(task: Task, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Settings of the methods that sample."""
    if task.method in ("sft", "reward", "dpo"):
        return {}
    judged = {"kind": "judge", "path": str(task.path("judge"))}
    own: dict[str, dict[str, Any]] = {
        "ppo": {"epochs": task.epochs, "minibatches": 1},
        "grpo": {"samples": task.samples, "kl_in_loss": task.kl},
        "rloo": {"samples": task.samples, "kl_coefficient": task.kl},
        "online-dpo": {"samples": task.samples},
    }
    critic = {"critic": {"learning_rate": optimizer["learning_rate"]}} if task.method == "ppo" else {}
    return {
        "rollout": {"prompts_per_step": task.rows // task.samples, "max_tokens": task.max_new_tokens},
        "rewards": [judged] if task.method == "ppo" else [*task.rewards],
        "algorithm": own[task.method],
        **({"environment": {"tools": [task.tool], "max_turns": 2}} if task.tool else {}),
        **critic,
    }


def generate(task: Task, gate: Gate, tracer: Tracer) -> None:
    """Answers of given lengths to all prompts at once, time after time."""
    path = str(task.path("policy"))
    model, tokenizer = load_model(path, dtype=getattr(torch, task.dtype)), load_tokenizer(path)
    asked = [tuple(tokenizer(row["prompt"])["input_ids"]) for row in read_rows(task.data)]
    engine = NativeEngine(model, tokenizer, slots=task.slots or task.rows, ends=())
    temperature = 0.0 if task.greedy else 1.0
    lengths = iter(task.lengths())  # prompt by prompt
    plans = [[Sampling(max_tokens=next(lengths), temperature=temperature) for _ in range(task.samples)] for _ in asked]

    async def answer_all(number: int) -> list[Completion]:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for index, (tokens, plan) in enumerate(zip(asked, plans, strict=True)):
                seeded = [replace(one, seed=completion_seed(number, index, k)) for k, one in enumerate(plan)]
                asking = engine.generate(tokens, seeded) if task.turns == 1 else episode(engine, task, tokens, seeded)
                running.append(tasks.create_task(asking))
        return [answer for one in running for answer in one.result()]

    answers: list[Completion] = []
    for number in range(gate.total):
        answers = asyncio.run(answer_all(number))
        tracer.end(number + 1)
        gate.passed(sum(len(answer.tokens) for answer in answers))
        tracer.begin(number + 1)
    tokens = [list(answer.tokens) for answer in answers] if task.greedy else []
    gate.finish(figures=decoding(task, asked), tokens=tokens, versions=VERSIONS, profile=tracer.result)


async def episode(engine: NativeEngine, task: Task, prompt: tuple[int, ...], plan: list[Sampling]) -> list[Completion]:
    """One answer's tokens in turns, of which an environment writes some: as many tokens as in one turn."""
    (sampling,), context = plan, list(prompt)
    each = sampling.max_tokens // task.turns
    for turn in range(task.turns):
        if turn:
            await asyncio.sleep(task.pause)
            context += prompt[:SAID]
        drawn = replace(sampling, max_tokens=each - (SAID if turn else 0), episode=sampling.seed, first=len(prompt))
        (answer,) = await engine.generate(context, [drawn])
        context += answer.tokens
    return [replace(answer, tokens=context[len(prompt) :])]


def decoding(task: Task, asked: list[tuple[int, ...]]) -> dict[str, float]:
    """On what the floor of this line depends, for one new token; `floor.Decoding` says what the names mean."""
    lengths, prompts = task.lengths(), [len(tokens) for tokens in asked for _ in range(task.samples)]
    new = sum(lengths)
    looked_at = sum(n * (prompt + (n - 1) / 2) for n, prompt in zip(lengths, prompts, strict=True))
    computed = sum(prompts) / task.samples
    return {"prompt_tokens": computed / new, "context": looked_at / new, "batch": task.rows, "length": new / task.rows}


def tell_apart() -> None:
    """Open the ranges of a profile (`anatomy.py`). The head of a decoding step is a part of its kernel: it is timed by
    computing it once more, by the same kernel without layers."""
    step = steps.run
    native.sample = record_function(DRAWING)(native.sample)

    def twice(name: str, *tensors: Any, **numbers: float) -> None:
        step(name, *tensors, **numbers)
        if name == "step":
            layers, *others, tables, keys, values, x, room, logits = tensors
            with record_function(AGAIN):
                step(name, layers[:0], *others, tables[:0], keys, values, x, room, logits, **numbers)

    steps.run = twice


def main() -> None:
    task, gate = begin()
    tracer = Tracer(task.steps) if task.profile else Tracer(0)
    if task.profile:
        tell_apart()
    act: Callable[[Task, Gate, Tracer], None] = generate if task.method == "generate" else train
    act(task, gate, tracer)


if __name__ == "__main__":
    main()
