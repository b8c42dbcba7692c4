"""TRL's side of the race: `race_trl.py METHOD DATA OUTPUT LINES THREADS SEED` trains SFT, reward model, then METHOD.

Model and settings of the method are those of race.yaml, SFT and reward model those of the demo's recipe. The judge is
asked about texts that end as those it was trained on, and unfinished answers get -1 (else it stops ending them).
Everything runs in float32 without checkpointing, TRL's best on a CPU. Of ours it imports the gold function alone, which
weighs nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
import yaml
from contender_trl import COMMON
from datasets import Dataset
from task import read_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from plaudit.tasks.demo import gold

BOTH = yaml.safe_load(Path(__file__).with_name("race.yaml").read_text(encoding="utf-8"))
ONLINE = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}


class Race:
    """The stages, in order."""

    def __init__(self, method: str, data: Path, output: Path, lines: Path, seed: int):
        self.method, self.data, self.output, self.lines = method, data, output, lines
        self.own = BOTH["trl"][method]
        own = {
            "output_dir": str(output),
            "seed": seed,
            "bf16": False,
            "lr_scheduler_type": "linear",
            "logging_steps": 50,
        }
        self.given = COMMON | own
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")

    def rows(self, name: str) -> Dataset:
        return Dataset.from_list(read_rows(self.data / f"{name}.jsonl"))

    def say(self, **content: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(content) + "\n")

    def imitate(self) -> None:
        """SFT: 1.5 epochs of 64 rows."""
        special = {"bos_token_id": None, "eos_token_id": self.tokenizer.eos_token_id}
        special |= {"vocab_size": len(self.tokenizer), "pad_token_id": self.tokenizer.pad_token_id}
        config = AutoConfig.for_model(**BOTH["model"], **special)
        own = {"per_device_train_batch_size": 64, "num_train_epochs": 1.5, "learning_rate": 2e-3, "weight_decay": 0.01}
        trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=trl.SFTConfig(**self.given, **own, warmup_steps=0.05, max_length=128),
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
        trainer = trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(**(self.given | own), max_length=128),
            train_dataset=self.rows("preferences"),
            processing_class=self.tokenizer,
        )
        trainer.train()
        self.say(stage="reward")
        return trainer.model.eval()

    def policy(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.output / "policy", dtype=torch.float32)

    def prefer(self) -> None:
        """DPO on the pairs that a judge would learn from."""
        trainer = trl.DPOTrainer(
            model=self.policy(),
            args=trl.DPOConfig(**self.given, **self.own),
            train_dataset=self.rows("preferences"),
            processing_class=self.tokenizer,
        )
        trainer.train()
        trainer.save_model(str(self.output / self.method))
        self.say(stage="trained")

    def improve(self, judge: Any) -> None:
        """Train on sampled answers. The race ends this process once the mark is passed."""
        end = self.tokenizer.eos_token

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

        config, trainer = ONLINE[self.method]
        trainer(
            model=self.policy(),
            reward_funcs=judged,
            args=config(**self.given, **self.own),
            train_dataset=self.rows("prompts"),
            processing_class=self.tokenizer,
        ).train()


def main() -> None:
    method = sys.argv[1]
    data, output, lines = map(Path, sys.argv[2:5])
    output.mkdir(parents=True)
    torch.set_num_threads(int(sys.argv[5]))
    race = Race(method, data, output, lines, int(sys.argv[6]))
    race.imitate()
    if method == "dpo":
        race.prefer()
    else:
        race.improve(race.judge())


if __name__ == "__main__":
    main()
