"""TRL's side of the race: `race_trl.py DATA OUTPUT LINES THREADS SEED` trains SFT, reward model and GRPO on the demo.

Model, SFT and reward settings are those of the demo's recipe. GRPO is tuned for the task: 8 prompts x 16 samples, a
rate of 2e-4, beta 0.03, the judge asked about texts that end as those it was trained on, and -1 for unfinished answers
(else it stops ending them). Everything runs in float32 without checkpointing, TRL's best on a CPU. Of ours it imports
the gold function alone, which weighs nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from task import read_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from plaudit.tasks.demo import gold

PROMPTS, SAMPLES, STEPS = 8, 16, 400
COMMON = {
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 50,
}


class Race:
    """The three stages, in order."""

    def __init__(self, data: Path, output: Path, lines: Path, seed: int):
        self.data, self.output, self.lines = data, output, lines
        self.given = {**COMMON, "output_dir": str(output), "seed": seed}
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")

    def rows(self, name: str) -> Dataset:
        return Dataset.from_list(read_rows(self.data / f"{name}.jsonl"))

    def say(self, **content: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(content) + "\n")

    def imitate(self) -> None:
        """SFT: 1.5 epochs of 64 rows."""
        special = {"bos_token_id": None, "eos_token_id": self.tokenizer.eos_token_id}
        size = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": len(self.tokenizer)}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(**size, **special, **dropout, pad_token_id=self.tokenizer.pad_token_id)
        own = {"per_device_train_batch_size": 64, "num_train_epochs": 1.5, "learning_rate": 2e-3, "weight_decay": 0.01}
        trainer = SFTTrainer(
            model=GPT2LMHeadModel(config),
            args=SFTConfig(**self.given, **own, warmup_steps=0.05, max_length=128),
            train_dataset=self.rows("sft"),
            processing_class=self.tokenizer,
        )
        trainer.train()
        trainer.save_model(str(self.output / "policy"))
        self.say(stage="sft")

    def judge(self) -> Any:
        """One epoch of 16 pairs."""
        model = AutoModelForSequenceClassification.from_pretrained(
            self.output / "policy", num_labels=1, dtype=torch.float32
        )
        own = {"per_device_train_batch_size": 16, "num_train_epochs": 1, "learning_rate": 5e-4, "weight_decay": 0.01}
        own |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.05, "center_rewards_coefficient": 0.01}
        trainer = RewardTrainer(
            model=model,
            args=RewardConfig(**(self.given | own), max_length=128),
            train_dataset=self.rows("preferences"),
            processing_class=self.tokenizer,
        )
        trainer.train()
        self.say(stage="reward")
        return trainer.model.eval()

    def improve(self, judge: Any) -> None:
        """GRPO until whoever watches has seen enough."""
        end = self.tokenizer.eos_token
        policy = AutoModelForCausalLM.from_pretrained(self.output / "policy", dtype=torch.float32)

        def judged(
            prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
        ) -> list[float]:
            golds = [gold(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
            self.say(gold=sum(golds) / len(golds), answers=len(golds))
            texts = [prompt + completion + end for prompt, completion in zip(prompts, completions, strict=True)]
            batch = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
            with torch.inference_mode():
                scores = judge(**batch).logits[:, 0].tolist()
            finished = [self.tokenizer.eos_token_id in ids for ids in completion_ids]
            return [score if done else -1.0 for score, done in zip(scores, finished, strict=True)]

        own = {"per_device_train_batch_size": PROMPTS * SAMPLES, "max_steps": STEPS, "learning_rate": 2e-4}
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=judged,
            args=GRPOConfig(
                **self.given,
                **own,
                num_generations=SAMPLES,
                max_completion_length=48,
                steps_per_generation=1,
                beta=0.03,
            ),
            train_dataset=self.rows("prompts"),
            processing_class=self.tokenizer,
        )
        trainer.train()


def main() -> None:
    data, output, lines = map(Path, sys.argv[1:4])
    output.mkdir(parents=True)
    torch.set_num_threads(int(sys.argv[4]))
    race = Race(data, output, lines, int(sys.argv[5]))
    race.imitate()
    race.improve(race.judge())


if __name__ == "__main__":
    main()
