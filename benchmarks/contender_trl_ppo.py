"""TRL's PPO as a contender: `contender_trl_ppo.py TASK`, for the last TRL that has one, in its own environment.

Left out of `contender_trl.py` because everything about it differs: where it is imported from, four models handed in,
and a loop of its own that always samples to the full length and cuts afterwards.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from contender_trl import Steps, arguments, language_model, scalar_model, versions
from datasets import Dataset
from gate import Gate
from task import Task, read_rows
from transformers import AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Asked:
    """Tokens that the reward model is asked about: prompts and answers up to their end token, without padding."""

    def __init__(self, model: Any):
        self.count = 0
        backbone = getattr(model, model.base_model_prefix)
        backbone.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module: Any, positional: Any, named: dict[str, Any]) -> None:
        self.count += int(named["attention_mask"].sum())

    def taken(self) -> int:
        """The count since it was last taken."""
        count, self.count = self.count, 0
        return count


def main() -> None:
    task = Task.read(sys.argv[1])
    os.chdir(task.output)  # nothing of TRL's lands elsewhere
    gate = Gate(steps=task.steps, repeats=task.repeats)
    torch.set_num_threads(task.threads)
    tokenizer = AutoTokenizer.from_pretrained(task.path("policy"), padding_side="left")
    prompts = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in read_rows(task.data)]
    config = PPOConfig(
        **{key: value for key, value in arguments(task).items() if key != "max_steps"},
        total_episodes=gate.total * task.rows,
        num_ppo_epochs=task.epochs,
        num_mini_batches=1,
        response_length=task.max_new_tokens,
        stop_token="eos",
        temperature=1.0,
        num_sample_generations=0,
    )
    judge = scalar_model(task)
    asked = Asked(judge)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=language_model(task),
        ref_model=language_model(task),
        reward_model=judge,
        value_model=scalar_model(task),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Steps(gate, asked.taken)],
    )
    trainer.train()
    # No reward to compare: TRL's judge reads an unfinished answer as it stands, Plaudit's with an end token behind it.
    gate.finish(figures={}, versions=versions())


if __name__ == "__main__":
    main()
