"""Files of systems that are not read are recognised, and answered with settings that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit.algorithms import ALGORITHMS
from plaudit.importers import files
from plaudit.importers.files import opened
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import leaves

AXOLOTL = """
base_model: owner/base
load_in_4bit: true
strict: false
datasets: [{path: owner/chats, type: chat_template}]
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 32
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
"""
LLAMA_FACTORY = """
model_name_or_path: owner/base
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
dataset: pairs
template: llama3
cutoff_len: 2048
output_dir: saves/dpo
plot_loss: true
per_device_train_batch_size: 1
learning_rate: 5.0e-6
"""


@pytest.mark.parametrize(
    ("system", "text", "lines", "rest"),
    [
        (
            "Axolotl",
            AXOLOTL,
            [
                "base_model: model.path",
                "sequence_len: data.max_tokens",
                "lora_r: model.lora.rank",
                "num_epochs: train.epochs",
            ],
            "strict",
        ),
        (
            "LLaMA-Factory",
            LLAMA_FACTORY,
            ["model_name_or_path: model.path", "cutoff_len: data.max_tokens", "pref_beta: algorithm.beta"],
            "plot_loss",
        ),
    ],
)
@pytest.mark.parametrize("method", ["dpo", None])
def test_a_file_is_told_whose_it_is_and_what_is_nearest(
    system: str, text: str, lines: list[str], rest: str, method: str | None
) -> None:
    with pytest.raises(SettingsError, match=f"file of {system}, ") as raised:
        opened(yaml.safe_load(text), method)
    told = str(raised.value).splitlines()
    assert {f"  - {line}" for line in lines} <= set(told)
    assert rest in told[-1].rstrip(".").removeprefix("No setting is near ").split(", ")
    assert "learning_rate: optimizer.learning_rate" in "\n".join(told)


def test_every_nearest_setting_is_there() -> None:
    known = {leaf.key for leaf in [*leaves(Settings()), *leaves(Settings(), "")]}
    known |= {leaf.key for method in ALGORITHMS.values() for leaf in leaves(method, "algorithm.")}
    systems: dict[str, Any] = yaml.safe_load(Path(files.__file__).with_name("unread.yaml").read_text())
    for one in systems.values():
        for answer in one["nearest"].values():
            named = re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]", answer)
            assert set(named) <= known
            assert named or "plaudit" in answer or answer.startswith(("rewards", "the option"))


def test_files_that_are_read_are_not_taken_for_others() -> None:
    folder = Path(__file__).parent / "foreign"
    for file in (*folder.glob("*.yaml"), *(Path(__file__).parents[2] / "configs").glob("*.yaml")):
        files.refuse_unread(yaml.safe_load(file.read_text(encoding="utf-8")))
