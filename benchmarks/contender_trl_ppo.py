"""TRL's PPO as a contender: `contender_trl_ppo.py PLAN ppo`, for the last TRL that has one, in its own environment.

Left out of `contender_trl.py` because everything about it differs: where it is imported from, four models handed in,
and a loop of its own that always samples to the full length and cuts afterwards.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from contender_trl import Steps, arguments, versions
from datasets import Dataset
from gate import Gate
from plan import Plan, read_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
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
    plan, line = Plan.read(sys.argv[1]), sys.argv[2]
    os.chdir(plan.output)  # nothing of TRL's lands elsewhere
    gate = Gate(steps=plan.steps(line), repeats=plan.repeats)
    torch.set_num_threads(plan.threads)
    tokenizer = AutoTokenizer.from_pretrained(plan.path("policy"), padding_side="left")
    prompts = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in read_rows(plan.path("ppo.jsonl"))]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(plan.path("policy"), dtype=torch.float32) for _ in range(2)
    )
    judge, critic = (
        AutoModelForSequenceClassification.from_pretrained(plan.path("judge"), num_labels=1, dtype=torch.float32)
        for _ in range(2)
    )
    given = arguments(plan, line, gate)
    config = PPOConfig(
        **{key: value for key, value in given.items() if key != "max_steps"},
        total_episodes=gate.total * plan.rows,
        num_ppo_epochs=plan.ppo_epochs,
        num_mini_batches=1,
        response_length=plan.max_new_tokens,
        stop_token="eos",
        temperature=1.0,
        num_sample_generations=0,
    )
    asked = Asked(judge)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=judge,
        value_model=critic,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Steps(gate, asked.taken)],
    )
    trainer.train()
    # No reward to compare: TRL's judge reads an unfinished answer as it stands, Assent's with an end token behind it.
    gate.finish(figures={}, versions=versions())


if __name__ == "__main__":
    main()
