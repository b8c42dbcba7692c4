"""TRL as a contender: `contender_trl.py TASK` runs SFT, reward model, DPO, GRPO, RLOO, online DPO or PPO.

Settings are TRL's best on a CPU: no gradient checkpointing (its default has it), fused AdamW, no workers, no saving,
figures logged once a segment; float32 throughout (its default is bf16), or its bf16 (autocast over float32 weights).
Packing stays off: without flash attention it builds a full mask over long rows. PPO is that of the last TRL that has
one, in an environment of its own. The peers' environments hold no Plaudit; this file imports `harness` and `task`.
"""

from __future__ import annotations

import importlib.util
import inspect
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gate import Gate
from harness import versions
from task import PRETRAINED, Task, begin, read_rows, richness
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback


class Steps(TrainerCallback):
    """Tells the gate of every step; `tokens` says how many it processed. `saves`: as of `Task`."""

    def __init__(self, gate: Gate, tokens: Callable[[], int], *, saves: bool = False):
        self.gate, self.tokens, self.saves = gate, tokens, saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saves and (self.gate.done + 1) % self.gate.steps == 0:
            kwargs["model"].save_pretrained("adapter")
        self.gate.passed(self.tokens())


COMMON = {
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of all of TRL's trainers, here and in the race."""


ROWS = 32
"""Most answers of a pass with the pretrained model, a quarter with a tool, which prompts describe at length: with all
128 of the race, or 32 with the tool, TRL needs more than 23 GiB."""


def arguments(task: Task) -> dict[str, Any]:
    return COMMON | {
        "output_dir": task.output,
        "max_steps": task.total_steps,
        "per_device_train_batch_size": task.rows,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": task.precision == "bf16",
        "logging_steps": task.steps,
        "seed": task.seed,
    }


def language_model(task: Task, name: str = "policy") -> Any:
    return AutoModelForCausalLM.from_pretrained(task.path(name), dtype=torch.float32)


def scalar_model(task: Task, name: str = "judge") -> Any:
    return AutoModelForSequenceClassification.from_pretrained(task.path(name), num_labels=1, dtype=torch.float32)


def offline(task: Task, gate: Gate) -> None:
    """SFT, reward or DPO on the rows in the order of the file, or grouped by length."""
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    given = arguments(task)
    given["train_sampling_strategy"] = "group_by_length" if task.sorted_rows else "sequential"
    if task.method == "sft":
        model, kind, config = language_model(task, "fresh"), SFTTrainer, SFTConfig(**given)
    else:
        given["per_device_train_batch_size"] = task.rows // 2
        if task.method == "reward":
            model, kind, config = scalar_model(task), RewardTrainer, RewardConfig(**given)
        else:
            model, kind, config = language_model(task), DPOTrainer, DPOConfig(**given)
    counts: deque[int] = deque()
    trainer = kind(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(read_rows(task.data)),
        processing_class=AutoTokenizer.from_pretrained(task.path("policy")),
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
    gate.finish(figures={"loss": logged(trainer, "loss")[-1]}, versions=versions("trl"))


def groups(task: Task, gate: Gate) -> None:
    """GRPO or RLOO, sampling with transformers' generate."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    seen = [0]

    def tokens() -> int:
        """Prompt and answer tokens since the last step, without padding, as the trainer counts them itself."""
        before, seen[0] = seen[0], int(trainer.state.num_input_tokens_seen)
        return seen[0] - before

    passes = -(-task.rows // (ROWS // 4 if task.tool else ROWS)) if task.model == PRETRAINED else 1
    given = arguments(task) | {"per_device_train_batch_size": task.rows // passes}
    kind, config = (GRPOTrainer, GRPOConfig) if task.method == "grpo" else (RLOOTrainer, RLOOConfig)
    tokenizer = AutoTokenizer.from_pretrained(task.path("policy"))
    trainer = kind(
        model=language_model(task),
        reward_funcs=[by_batch(one["function"], tokenizer.eos_token_id) for one in task.rewards],
        args=config(
            **given,
            reward_weights=[one.get("weight", 1.0) for one in task.rewards],
            num_generations=task.samples,
            max_completion_length=task.max_new_tokens * (2 if task.tool else 1),  # TRL's counts all turns
            gradient_accumulation_steps=passes,
            steps_per_generation=passes,
            beta=task.kl,
            shuffle_dataset=False,
            **({"max_tool_calling_iterations": 1} if task.tool else {}),
        ),
        train_dataset=Dataset.from_list(read_rows(task.data)),
        processing_class=tokenizer,
        callbacks=[Steps(gate, tokens, saves=task.saves)],
        peft_config=adapters(task.lora) if task.lora else None,
        tools=[named(task.tool)] if task.tool else None,
    )
    trainer.train()
    figures = {
        "reward": statistics.fmean(logged(trainer, "reward")),
        "length": statistics.fmean(logged(trainer, "completions/mean_length")),
    }
    gate.finish(figures=figures, versions=versions("trl"))


def adapters(rank: int) -> Any:
    """On every projection, and with the alpha, as Plaudit's are."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def by_batch(address: str, end: int) -> Callable[..., list[float]]:
    """A function of one answer, as TRL calls a reward: with the columns of a batch."""
    function = named(address)
    wanted = inspect.signature(function).parameters

    def scored(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        columns["completion"] = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        columns["finished"] = [end in ids for ids in completion_ids]
        return [function(**{key: columns[key][n] for key in wanted}) for n in range(len(completions))]

    return scored


def named(address: str) -> Callable[..., Any]:
    """A function "MODULE:NAME" or "FILE.py:NAME"."""
    place, _, name = address.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def online_dpo(task: Task, gate: Gate) -> None:
    """Online DPO, whose trainer samples two answers of each prompt and counts nothing: the reward function does."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(task.path("policy"), padding_side="left")
    counts: deque[int] = deque()
    lengths: list[float] = []
    rewards: list[float] = []

    def reward(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        answers = [sum(token != tokenizer.pad_token_id for token in ids) for ids in completion_ids]
        counts.append(sum(answers) + sum(len(ids) for ids in tokenizer(list(prompts))["input_ids"]))
        lengths.append(statistics.fmean(answers))
        found = [richness(completion) for completion in completions]
        rewards.append(statistics.fmean(found))
        return found

    given = arguments(task) | {"per_device_train_batch_size": task.rows // task.samples}
    trainer = OnlineDPOTrainer(
        model=language_model(task),
        ref_model=language_model(task),
        reward_funcs=reward,
        args=OnlineDPOConfig(**given, max_new_tokens=task.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0),
        train_dataset=Dataset.from_list(read_rows(task.data)),
        processing_class=tokenizer,
        callbacks=[Steps(gate, counts.popleft)],
    )
    trainer.train()
    figures = {"reward": statistics.fmean(rewards), "length": statistics.fmean(lengths)}
    gate.finish(figures=figures, versions=versions("trl"))


def logged(trainer: Any, name: str) -> list[float]:
    """The trainer's own means, one a segment."""
    return [float(record[name]) for record in trainer.state.log_history if name in record]


class Asked:
    """Tokens that PPO's reward model is asked about: prompts and answers up to their end token, without padding."""

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


def ppo(task: Task, gate: Gate) -> None:
    """PPO takes four models, and always samples to the full length and cuts afterwards."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

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
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=language_model(task),
        ref_model=language_model(task),
        reward_model=judge,
        value_model=scalar_model(task),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Steps(gate, Asked(judge).taken)],
    )
    trainer.train()
    # No reward to compare: TRL's judge reads an unfinished answer as it stands, Plaudit's with an end token behind it.
    gate.finish(figures={}, versions=versions("trl"))


def main() -> None:
    task, gate = begin()
    {"grpo": groups, "rloo": groups, "online-dpo": online_dpo, "ppo": ppo}.get(task.method, offline)(task, gate)


if __name__ == "__main__":
    main()
