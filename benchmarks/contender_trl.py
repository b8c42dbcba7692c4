"""TRL as a contender: `contender_trl.py PLAN LINE` runs SFT, reward, DPO, GRPO or transformers' generate.

Settings are TRL's best on a CPU: float32 (its default is bf16), no gradient checkpointing (on by default), fused AdamW,
no worker processes, no saving, figures logged once a segment. Packing stays off: without flash attention it builds a
full mask over long rows. The peers' environments hold no Assent; this file imports `gate` and `plan` alone.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from gate import Gate
from plan import Plan, read_rows, richness
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    TrainerCallback,
)


class Steps(TrainerCallback):
    """Tells the gate of every step; `tokens` says how many it processed."""

    def __init__(self, gate: Gate, tokens: Callable[[], int]):
        self.gate, self.tokens = gate, tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gate.passed(self.tokens())


def arguments(plan: Plan, line: str, gate: Gate) -> dict[str, Any]:
    """What all of TRL's trainers are told."""
    return {
        "output_dir": plan.output,
        "max_steps": gate.total,
        "per_device_train_batch_size": plan.rows,
        "learning_rate": plan.rate(line),
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": gate.steps,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def offline(plan: Plan, line: str, gate: Gate) -> None:
    """SFT, reward or DPO on the rows in the order of the file; `-sorted` groups rows of similar length instead."""
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    method, _, batches = line.partition("-")
    given = arguments(plan, line, gate)
    given["train_sampling_strategy"] = "group_by_length" if batches == "sorted" else "sequential"
    if method == "sft":
        model = AutoModelForCausalLM.from_pretrained(plan.path("fresh"), dtype=torch.float32)
        kind, config = SFTTrainer, SFTConfig(**given)
    else:
        given["per_device_train_batch_size"] = plan.rows // 2
        if method == "reward":
            folder = plan.path("judge")
            model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
            kind, config = RewardTrainer, RewardConfig(**given)
        else:
            model = AutoModelForCausalLM.from_pretrained(plan.path("policy"), dtype=torch.float32)
            kind, config = DPOTrainer, DPOConfig(**given)
    counts: deque[int] = deque()
    trainer = kind(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(read_rows(plan.path(f"{method}.jsonl"))),
        processing_class=AutoTokenizer.from_pretrained(plan.path("policy")),
        callbacks=[Steps(gate, counts.popleft)],
    )
    collate = trainer.data_collator

    def counted(examples: Sequence[Any]) -> Any:
        """The loader runs a batch ahead, so counts wait in a queue for the step that they belong to."""
        batch = collate(examples)
        counts.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()
    gate.finish(figures={"loss": logged(trainer, "loss")[-1]}, versions=versions())


def grpo(plan: Plan, line: str, gate: Gate) -> None:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        return [richness(completion) for completion in completions]

    seen = [0]

    def tokens() -> int:
        """Prompt and answer tokens since the last step, without padding, as the trainer counts them itself."""
        before, seen[0] = seen[0], int(trainer.state.num_input_tokens_seen)
        return seen[0] - before

    config = GRPOConfig(
        **arguments(plan, line, gate),
        num_generations=plan.samples,
        max_completion_length=plan.max_new_tokens,
        steps_per_generation=1,
        beta=plan.kl_in_loss,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(plan.path("policy"), dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(read_rows(plan.path("grpo.jsonl"))),
        processing_class=AutoTokenizer.from_pretrained(plan.path("policy")),
        callbacks=[Steps(gate, tokens)],
    )
    trainer.train()
    figures = {
        "reward": statistics.fmean(logged(trainer, "reward")),
        "length": statistics.fmean(logged(trainer, "completions/mean_length")),
    }
    gate.finish(figures=figures, versions=versions())


@torch.inference_mode()
def generate(plan: Plan, line: str, gate: Gate) -> None:
    """transformers' `generate` on all prompts at once, padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(plan.path("policy"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(plan.path("policy"), padding_side="left")
    asked = tokenizer(
        [row["prompt"] for row in read_rows(plan.path("generation.jsonl"))], return_tensors="pt", padding=True
    )
    greedy, end = line == "generation-greedy", tokenizer.eos_token_id
    least = plan.max_new_tokens if greedy else 0
    sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=plan.max_new_tokens,
        min_new_tokens=least,
        do_sample=not greedy,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    torch.manual_seed(0)
    lengths: list[int] = []
    for _ in range(gate.total):
        answers = model.generate(**asked, generation_config=config)[:, asked["input_ids"].shape[1] :]
        count = int((answers != tokenizer.pad_token_id).sum())  # the pad is a token that no answer contains
        lengths.append(count)
        gate.passed(count)
    tokens = answers.tolist() if greedy else []
    figures = {"length": statistics.fmean(lengths) / len(answers)}
    gate.finish(figures=figures, tokens=tokens, versions=versions())


def logged(trainer: Any, name: str) -> list[float]:
    """The trainer's own means, one a segment."""
    return [float(record[name]) for record in trainer.state.log_history if name in record]


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("trl", "torch", "transformers")}


def main() -> None:
    plan, line = Plan.read(sys.argv[1]), sys.argv[2]
    os.chdir(plan.output)  # nothing of TRL's lands elsewhere
    gate = Gate(steps=plan.steps(line), repeats=plan.repeats)
    torch.set_num_threads(plan.threads)
    (generate if line.startswith("generation") else grpo if line == "grpo" else offline)(plan, line, gate)


if __name__ == "__main__":
    main()
