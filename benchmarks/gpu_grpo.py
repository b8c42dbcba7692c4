"""Parts of `gpu.py`: steps of GRPO by the usual path, and by TRL."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from floor import Peak
from gpu_extent import Extent, Figure, folder_of, memory, wait
from task import evenness, read_rows

HERE = Path(__file__).resolve().parent


class Enough(Exception):
    """The run has made the steps that were wanted; its checkpoint is not."""


def grpo(extent: Extent, best: Peak) -> Iterator[Figure]:
    """Steps of a whole run: the demo's prompts, random weights, a reward that tokens decide. Twice: with everything on
    the device all the time, and with what waits in host memory meanwhile."""
    shares: dict[str, Any] = {"runtime": {"offload": ["reference"], "placement": {"generate": {"shares": "train"}}}}
    yield from told(extent, *steps_of(extent))
    [again, *_] = told(extent, *steps_of(extent, **shares))
    what = "the same with runtime.offload=[reference] and placement={generate: {shares: train}}"
    yield again | {"what": what}


def steps_of(extent: Extent, **sections: Any) -> tuple[list[dict[str, float]], list[float]]:
    """Figures of each step, and the memory that was held at most."""
    from omegaconf import OmegaConf

    from plaudit import load_settings, run
    from plaudit.loop.progress import Moment
    from plaudit.types import Stats

    history: list[dict[str, float]] = []

    async def count(moment: Moment) -> Stats:
        assert moment.batch is not None
        tokens, answers = int(moment.batch.lengths.sum()), int(moment.batch.trainable.sum())
        history.append(dict(moment.stats) | {"tokens": tokens, "answers": answers})
        if len(history) == extent.updates + 1:
            raise Enough
        return {}

    with tempfile.TemporaryDirectory() as folder, memory(extent.device) as held:
        given = OmegaConf.merge(recipe(extent, Path(folder)), sections)
        settings = load_settings(OmegaConf.to_container(given), method="grpo")
        with suppress(Enough):
            run(settings, hooks=[count])
    return history, held


def recipe(extent: Extent, folder: Path) -> dict[str, Any]:
    """A run's settings, and the data that they name."""
    from plaudit.tasks.demo import DemoSize, make_demo

    size = {"sft": 200, "sft_validation": 1, "pairs": 4, "pairs_validation": 1, "prompts_test": 1, "vocabulary": 400}
    files = make_demo(folder / "data", size=DemoSize(**size, prompts=extent.prompts * (extent.updates + 1)))
    return {
        "name": "grpo",
        "output": str(folder),
        "device": extent.device,
        "model": {"path": str(folder_of(extent)), "tokenizer": str(files.tokenizer)},
        "data": {"train": str(files.prompts)},
        "algorithm": {"samples": extent.samples, "kl_in_loss": 0.01},
        "optimizer": {"learning_rate": 1e-5, "schedule": "constant"},
        "learn": {"precision": extent.dtype, "micro_tokens": extent.micro[1]},
        "rollout": {
            "prompts_per_step": extent.prompts,
            "max_tokens": extent.sampled,
            "slots": extent.prompts * extent.samples,
        },
        "rewards": [{"kind": "function", "function": f"{HERE / 'task.py'}:evenness"}],
        "train": {"steps": extent.updates + 9},
        "log": {"quiet": True},
    }


def told(extent: Extent, history: list[dict[str, float]], held: list[float]) -> list[Figure]:
    """The first step, which sets everything up, counts for the figures of learning alone."""
    steady = history[1:]
    keys = ("loss/policy", "reward/mean", "gradient_norm/policy")
    finite = all(math.isfinite(stats[key]) for stats in history for key in keys)
    total = {
        key: sum(stats[key] for stats in steady)
        for key in ("tokens", "answers", "time/batch", "time/learn", "time/step")
    }
    what = f"GRPO, {extent.prompts} prompts x {extent.samples} answers of up to {extent.sampled} tokens"
    rewards = f"reward {history[0]['reward/mean']:.3f} to {history[-1]['reward/mean']:.3f}"
    note = f"{len(history)} steps, {'losses, rewards and gradients finite' if finite else 'NOT finite'}; {rewards}"
    mib = held[0] if held else None
    return [
        {"what": what, "value": total["time/step"] / len(steady), "unit": "s/step", "mib": mib, "note": note},
        {"what": "its generation", "value": total["answers"] / total["time/batch"], "unit": "tok/s"},
        {"what": "its learning, reference included", "value": total["tokens"] / total["time/learn"], "unit": "tok/s"},
        {"what": "its KL between sampler and learner, first step", "value": history[0]["kl/sampler"], "unit": "nats"},
    ]


def trl_grpo(extent: Extent, best: Peak) -> list[Figure]:
    """The same by TRL's GRPOTrainer: transformers' `generate` samples all answers of a step at once, passes of about as
    many tokens learn from them; its bf16 is autocast over float32."""
    if importlib.util.find_spec("trl") is None:
        return [{"what": "GRPO by TRL", "note": "trl is not installed"}]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    rows = rows_of_a_pass(extent)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait(extent.device)
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, memory(extent.device) as held:
        data = Path(recipe(extent, Path(folder))["data"]["train"])
        tokenizer = AutoTokenizer.from_pretrained(data.parent / "tokenizer")
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder_of(extent), dtype=torch.float32),
            reward_funcs=lambda completion_ids, **columns: [evenness(tokens) for tokens in completion_ids],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=extent.updates + 1,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=extent.prompts * extent.samples // rows,
                learning_rate=1e-5,
                optim="adamw_torch_fused",
                use_cpu=extent.device == "cpu",
                bf16=extent.dtype == "bfloat16",
                gradient_checkpointing=False,
                num_generations=extent.samples,
                max_completion_length=extent.sampled,
                beta=0.01,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(read_rows(data)),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
        del trainer
    taken = (ends[-1] - ends[0]) / (len(ends) - 1)
    return [{"what": "GRPO by TRL, the same", "value": taken, "unit": "s/step", "mib": held[0] if held else None}]


def rows_of_a_pass(extent: Extent) -> int:
    """As many as Plaudit's micro-batches have tokens for, and a step whole ones of."""
    answers, length = extent.prompts * extent.samples, extent.prompt + extent.sampled
    return next(rows for rows in range(answers, 0, -1) if answers % rows == 0 and rows * length <= extent.micro[1])
