"""Shapes of the public recipes of open-r1 and alignment-handbook: what they say here, and what is refused.

The tables have their keys and kinds of values, not their texts. What their data sections mean is in `get_dataset` of
open-r1 (src/open_r1/utils/data.py) and `mix_datasets` of alignment-handbook (src/alignment/data.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from plaudit.importers.files import opened
from plaudit.settings.files import read
from plaudit.settings.recipes import read_settings
from plaudit.settings.tree import SettingsError

COMMON = """
model_name_or_path: owner/base
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: False}
hub_model_id: owner/trained
hub_strategy: every_save
push_to_hub: true
learning_rate: 2.0e-05
log_level: info
logging_steps: 5
logging_strategy: steps
max_steps: -1
output_dir: data/trained
overwrite_output_dir: true
per_device_train_batch_size: 4
per_device_eval_batch_size: 8
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
"""
"""Keys of nearly all of them."""
TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a mixture of two splits, of which a number of rows validates": (
        "sft",
        """
chat_template: "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: owner/chats, config: default, split: train_sft, columns: [messages], weight: 1.0}
    - {id: owner/chats, config: default, split: test_sft, columns: [messages], weight: 1.0}
  test_split_size: 1000
  seed: 0
do_eval: true
eval_strategy: epoch
remove_unused_columns: true
report_to: [wandb]
save_strategy: steps
save_steps: 100
dataset_kwargs: {add_special_tokens: false, append_concat_token: false}
""",
        {
            "data.train": "owner/chats:default",
            "data.split": "train_sft+test_sft",
            "data.validation": 1000,
            "data.chat_template": TEMPLATE,
            "evaluate.every": "1 epoch",
            "save.every": 100,
            "log.trackers": {"wandb": "huggingface"},
        },
    ),
    "a mixture with weights": (
        "sft",
        """
dataset_mixture:
  datasets:
    - {id: owner/talk, config: SFT, split: one, columns: [messages, chat_template_kwargs], weight: 1}
    - {id: owner/talk, config: SFT, split: two, weight: 0.5}
    - {id: owner/talk, config: SFT, split: three, weight: 0.02}
    - {id: owner/code, split: train}
  test_split_size: 0.05
trust_remote_code: true
assistant_only_loss: true
num_train_epochs: 5
eval_strategy: 'no'
save_strategy: steps
save_steps: 0.05
packing: true
packing_strategy: ffd
use_liger_kernel: true
""",
        {
            "data.train": ["owner/talk:SFT", "owner/code"],
            "data.split": {"owner/talk:SFT": "one+two[:50%]+three[:2%]", "owner/code": "train"},
            "data.validation": "5%",
            "data.every_turn": True,
            "save.every": "0.25 epochs",  # a twentieth of five
        },
    ),
    "pairs in the older form": (
        "dpo",
        """
dataset_mixer: {owner/pairs: 1.0, owner/more: 0.5}
dataset_splits: [train_prefs, test_prefs]
dataset_configs: [all, tiny]
preprocessing_num_workers: 12
use_flash_attention_2: true
tokenizer_name_or_path: owner/tokenizer
beta: 0.01
evaluation_strategy: steps
eval_steps: 100
optim: paged_adamw_32bit
max_prompt_length: 512
push_to_hub_revision: true
hub_model_revision: v1
""",
        {
            "data.train": ["owner/pairs:all", "owner/more:tiny"],
            "data.split": {"owner/pairs:all": "train_prefs", "owner/more:tiny": "train_prefs[:50%]"},
            "data.validation": ["owner/pairs:all", "owner/more:tiny"],
            "data.validation_split": "test_prefs",
            "model.tokenizer": "owner/tokenizer",
            "evaluate.every": 100,
        },
    ),
    "YAML's no": (
        "sft",
        """
dataset_name: owner/math
dataset_configs:
- all
do_eval: true
eval_strategy: no
save_strategy: off
report_to: no
use_liger: true
max_seq_length: 32768
""",
        {"data.train": "owner/math:all", "save.every": None, "data.max_tokens": 32768},
    ),
    "answers of a policy": (
        "grpo",
        """
dataset_name: owner/problems
dataset_prompt_column: problem
system_prompt: "Think.\\nAnswer."
callbacks: [push_to_hub_revision]
benchmarks: [math_500]
beta: 0.0
loss_type: dr_grpo
scale_rewards: false
use_vllm: true
vllm_device: auto
gradient_accumulation_steps: 16
max_completion_length: 8192
num_generations: 16
reward_funcs: [accuracy, format]
reward_weights: [1.0, 0.5]
report_to: [wandb, comet_ml]
wandb_entity: owner
wandb_project: problems
code_language: cpp
mask_truncated_completions: true
""",
        {
            "data.train": "owner/problems",
            "data.columns": {"prompt": "problem", "answer": "solution"},
            "data.system": "Think.\nAnswer.",
            "rollout.prompts_per_step": 4 * 16 // 16,
            "log.trackers": {"wandb": "problems"},
            "algorithm.kl_in_loss": 0.0,
        },
    ),
}
REFUSED = {
    "method sft, a checkpoint within a repository": (
        "model_revision: it-mid-training\neos_token: <|im_end|>",
        ["model_revision", "eos_token"],
    ),
    "method dpo, four bits": (
        "torch_dtype: float16\nuse_peft: true\nload_in_4bit: true\nlora_dropout: 0.05",
        ["load_in_4bit", "torch_dtype", "lora_dropout"],
    ),
    "method dpo, another loss": ("loss_type: apo_zero", ["loss_type"]),
    "method dpo, another optimizer": ("optim: rmsprop", ["optim"]),
    "method orpo, a schedule without an end": (
        "lr_scheduler_type: inverse_sqrt\nwarmup_steps: 100\noptim: adamw_bnb_8bit",
        ["lr_scheduler_type", "optim"],
    ),
    "method grpo, rewards of its own package": (
        "reward_funcs: [accuracy, cf_code]\nreward_weights: [1.0, 0.1]\nnum_generations: 4",
        ["reward_funcs: cf_code"],
    ),
    "method grpo, answers that fill no step": ("num_generations: 7", ["num_generations"]),
    "method sft, a thousandth of a split": (
        "dataset_mixture: {datasets: [{id: owner/chats, weight: 0.001}]}",
        ["dataset_mixture.datasets.0.weight"],
    ),
    "method sft, a mixture without names": ("dataset_mixture: {owner/chats: 1.0}", ["dataset_mixture"]),
    "method sft, a truth value where a word is due": ("eval_strategy: yes", ["eval_strategy"]),
}
"""By what they ask for: keys, and how the lines that refuse them begin."""


def opened_from(folder: Path, text: str, method: str) -> Any:
    """The text over what is common, as a file."""
    own = {line.partition(":")[0] for line in text.splitlines()}
    common = [line for line in COMMON.splitlines() if line.partition(":")[0] not in own]
    (folder / "recipe.yaml").write_text("\n".join([*common, text]), encoding="utf-8")
    return opened(read(folder / "recipe.yaml"), method)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_public_recipe_is_read(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    method, text, expected = SHAPES[shape]
    found = opened_from(tmp_path, text, method)
    for key, value in expected.items():
        part: Any = found.recipe
        for name in key.split("."):
            part = part[name]
        assert part == value, key
    settings = read_settings(found.recipe, (), method=method)
    assert method != "grpo" or [(one.kind, one.weight) for one in settings.rewards] == [("math", 1.0), ("matches", 0.5)]
    notes = "\n".join(found.notes)
    assert re.search(r"ignored: .*\bpush_to_hub\b.* \(nothing is uploaded", notes)
    assert re.search(r"ignored: .*\boverwrite_output_dir\b.* \(.*overwrite=true", notes)


def test_what_a_public_recipe_logs_elsewhere_is_ignored_with_a_line(tmp_path: Path) -> None:
    method, text, _ = SHAPES["answers of a policy"]
    notes = opened_from(tmp_path, text, method).notes
    for key in ("callbacks", "benchmarks", "wandb_entity", "comet_ml", "code_language", "vllm_device"):
        assert any(note.startswith("ignored: ") and key in note for note in notes), key


def test_rows_of_a_weighted_split_are_told_to_be_its_first(tmp_path: Path) -> None:
    method, text, _ = SHAPES["a mixture with weights"]
    assert any("first rows" in note for note in opened_from(tmp_path, text, method).notes)


@pytest.mark.parametrize("shape", REFUSED)
def test_a_public_recipe_is_refused_only_for_what_is_not_here(shape: str, tmp_path: Path) -> None:
    text, keys = REFUSED[shape]
    with pytest.raises(SettingsError) as raised:
        opened_from(tmp_path, text, shape.split(",")[0].removeprefix("method "))
    told = [line.removeprefix("  - ") for line in str(raised.value).splitlines()[1:]]
    assert [line.startswith(key) for line, key in zip(told, keys, strict=True)] == [True] * len(keys), told
