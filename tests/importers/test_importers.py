"""Settings files of other systems: what each key is here, why it is ignored or refused, and whole files by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from told import says

from plaudit.algorithms import ALGORITHMS
from plaudit.algorithms.orpo import ORPO
from plaudit.algorithms.simpo import SimPO
from plaudit.importers import async_rlhf, deepspeed, llm_on_ray, trl
from plaudit.importers.files import opened
from plaudit.importers.table import KeyTable, placed, table
from plaudit.settings.files import read
from plaudit.settings.imported import Imported
from plaudit.settings.recipes import load_settings
from plaudit.settings.tree import Settings, SettingsError
from plaudit.support.fields import leaves

FILES = Path(__file__).parent / "foreign"
ADAM = [0.9, 0.999]
TABLES = {
    "trl": table("TRL", "trl"),
    "async_rlhf": table("async_rlhf", "trl", "async_rlhf"),
    "llm_on_ray": table("LLM-on-Ray", "llm_on_ray"),
    "deepspeed": table("DeepSpeed", "deepspeed"),
}
READ: dict[str, Callable[[dict[str, Any], str], Imported]] = {
    "trl": trl.recipe,
    "async_rlhf": async_rlhf.recipe,
    "llm_on_ray": llm_on_ray.recipe,
    "deepspeed": lambda given, method: deepspeed.recipe(given, method, {}),
}
NESTED = ("llm_on_ray", "deepspeed")
THOUGHT = "(?s)^<think>(?!.*<think>).*?</think>.*$"

EXPECTED: dict[tuple[str, str], dict[str, Any]] = {
    ("reward.conf", "reward"): {
        "output": "/tmp/llm-ray/checkpoint",
        "name": "rm",
        "model": {"path": "EleutherAI/gpt2"},
        "data": {"train": "owner/pairs", "validation": "5%"},
        "optimizer": {"learning_rate": 1e-5, "weight_decay": 0.0, "schedule": "linear", "betas": ADAM},
        "learn": {"precision": "float32"},
        "train": {"epochs": 3.0, "batch_size": 4},
        "runtime": {"kind": "ray", "num_training_workers": 2, "resources_per_worker": {"CPU": 32}},
    },
    ("ppo.conf", "ppo"): {
        "model": {"path": "/tmp/llm-ray/checkpoint/sft"},
        "rewards": [{"kind": "judge", "path": "/tmp/llm-ray/checkpoint/rm"}],
        "data": {"train": "owner/prompts", "validation": "5%"},
        "algorithm": {"kl_coefficient": 0.2, "minibatches": 1},
        "optimizer": {"learning_rate": 1e-5, "schedule": "linear", "betas": ADAM},
        "critic": {"learning_rate": 1e-5},
        "learn": {"precision": "float32"},
        "rollout": {"prompts_per_step": 2},
        "train": {"epochs": 3.0},
        "runtime": {"kind": "ray", "num_training_workers": 2, "resources_per_worker": {"CPU": 32}},
    },
    ("finetune.yaml", "sft"): {
        "output": "/tmp/llm-ray",
        "name": "output",
        "seed": 7,
        "device": "cuda",
        "model": {"path": "EleutherAI/gpt-j-6b", "lora": {"rank": 8, "alpha": 32, "targets": ["q_proj", "v_proj"]}},
        "data": {
            "train": "owner/demonstrations",
            "validation": "owner/held_out",
            "shuffle": False,
            "max_tokens": 512,
            "max_prompt_tokens": 511,
        },
        "optimizer": {"learning_rate": 1e-5, "weight_decay": 0.01, "schedule": "cosine", "betas": ADAM},
        "learn": {"precision": "bfloat16", "activation_checkpointing": True},
        "train": {"steps": 200, "batch_size": 2 * 3 * 4, "log_every": 5},
        "save": {"every": None},
        "runtime": {
            "kind": "ray",
            "num_training_workers": 4,
            "resources_per_worker": {"CPU": 8, "GPU": 1},
            "strategy": "fsdp",
        },
    },
    ("sft.yaml", "sft"): {
        "output": "runs/chats",
        "name": "qwen",
        "seed": 3,
        "model": {"path": "Qwen/Qwen2.5-0.5B", "lora": {"rank": 32, "alpha": 16 * 32**0.5, "targets": []}},
        "data": {
            "train": "trl-lib/Capybara:main",
            "validation": "trl-lib/Capybara:main",
            "validation_split": "test",
            "max_tokens": 2048,
            "max_prompt_tokens": 2047,
            "overlong": "truncate",
            "every_turn": True,
        },
        "optimizer": {
            "learning_rate": 2e-4,
            "schedule": "cosine",
            "min_ratio": 0.1,
            "warmup": "50 steps",
            "betas": ADAM,
        },
        "learn": {"precision": "bfloat16", "activation_checkpointing": True},
        "train": {"steps": 1000, "batch_size": 2 * 8 * 4, "log_every": 20},
        "save": {"every": 250, "keep": 3},
        "evaluate": {"every": 100, "best": "loss"},
        "log": {"trackers": {"tensorboard": "tensorboard", "wandb": "chats"}},
        "runtime": {"kind": "ray", "num_training_workers": 4, "resources_per_worker": {"GPU": 1}},
    },
    ("dpo.yaml", "dpo"): {
        "device": "cpu",
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {
            "train": ["trl-lib/ultrafeedback_binarized", "pairs_a.jsonl", "pairs_b.jsonl"],
            "validation": "5%",
            "max_tokens": 1024,
            "max_prompt_tokens": 1023,
            "overlong": "truncate",
        },
        "algorithm": {"loss": "ipo", "length_average": True, "beta": 0.2},
        "optimizer": {
            "learning_rate": 1e-6,
            "betas": [0.9, 0.95],
            "weight_decay": 0.01,
            "schedule": "linear",
            "warmup": 0.1,
            "max_gradient_norm": 0.5,
        },
        "learn": {"precision": "float32"},
        "train": {"epochs": 3.0, "batch_size": 8},
        "evaluate": {"every": "1 epoch"},
    },
    ("grpo.yaml", "grpo"): {
        "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"train": "trl-lib/DeepMath-103K"},
        "rewards": [
            {"kind": "judge", "path": "runs/judge", "weight": 1.0},
            {"kind": "matches", "options": {"pattern": THOUGHT}, "weight": 0.5},
            {"kind": "overlong", "options": {"max_tokens": 1280, "cache_tokens": 256}, "weight": 0.25},
        ],
        "shaping": {"unfinished": "mask_loss"},
        "algorithm": {
            "samples": 4,
            "clip": [0.1, 0.3],
            "dual_clip": 2.0,
            "ratio": "geometric",
            "aggregation": 256.0,
            "kl_in_loss": 0.04,
            "kl_estimator": "k3",
            "epochs": 2,
            "minibatches": 2,  # 4 x 4 answers, 4 x 2 of them an optimizer step
            "scale_rewards": False,
        },
        "optimizer": {"learning_rate": 1e-6, "schedule": "linear", "betas": ADAM},
        "learn": {"precision": "bfloat16"},
        "rollout": {"prompts_per_step": 4, "max_tokens": 256, "temperature": 0.9},
        "train": {"steps": 100},  # 400 optimizer steps, 2 x 2 of them a step
        "save": {"every": 10},
    },
    ("rloo.yaml", "rloo"): {
        "output": "results",
        "name": "rloo_pythia410m_tldr6.9b",
        "model": {"path": "owner/pythia410m-sft-tldr", "tokenizer": "EleutherAI/pythia-410m"},
        "rewards": [{"kind": "judge", "path": "owner/pythia410m-rm-tldr6.9b"}],
        "data": {"train": "owner/summarize_from_feedback", "max_prompt_tokens": 512, "overlong": "drop"},
        "shaping": {"unfinished": -1.0},
        "algorithm": {
            "samples": 4,
            "clip": [0.2, 0.2],
            "ratio": "sequence",
            "aggregation": "sequence",
            "epochs": 1,
            "minibatches": 1,
            "kl_coefficient": 0.07,
        },
        "optimizer": {"learning_rate": 3e-6, "schedule": "linear", "betas": ADAM},
        "learn": {"precision": "bfloat16"},
        "rollout": {"prompts_per_step": 16 * 32 // 4, "max_tokens": 53, "temperature": 0.7, "slots": 32},
        "train": {"steps": 131072 // 512, "log_every": 100},
        "save": {"every": 64},
    },
}
SHARDED = {"kind": "ray", "num_training_workers": 2, "strategy": "fsdp"}
OFFLOADED = SHARDED | {"offload": ["weights"]}
ZERO2_OFFLOADED = SHARDED | {"strategy": "zero2", "offload": ["optimizer"]}
ZERO: dict[str, dict[str, Any]] = {
    "zero2.json": {"runtime": SHARDED | {"strategy": "zero2"}},
    "zero2_offload.json": {
        "runtime": ZERO2_OFFLOADED,
        "optimizer": {"schedule": "constant", "max_gradient_norm": 1.0},
        "learn": {"precision": "bfloat16"},
        "train": {"batch_size": 2 * 4 * 2},
    },
    "zero3.json": {
        "runtime": SHARDED,
        "optimizer": {
            "learning_rate": 3e-5,
            "betas": [0.8, 0.999],
            "eps": 1e-8,
            "weight_decay": 3e-7,
            "schedule": "linear",
            "warmup": 0.05,
            "max_gradient_norm": 0.5,
        },
        "learn": {"precision": "bfloat16"},
    },
    "zero3_offload.json": {"runtime": OFFLOADED, "train": {"batch_size": 64}},
    "openrlhf.json": {
        "runtime": SHARDED | {"offload": ["optimizer"]},
        "optimizer": {"max_gradient_norm": 1.0},
        "learn": {"precision": "bfloat16"},
        "train": {"batch_size": 128},
    },
}
"""What the four configurations that are most common, and OpenRLHF's own, say over a recipe of two ranks."""


SAMPLES = (1, 0.25, "text", True, [0.5, 0.25], {"CPU": 2.0}, 1000)


def given_by(system: str, values: dict[str, Any]) -> dict[str, Any]:
    return placed(values) if system in NESTED else values


def rows(part: str) -> list[Any]:
    return [
        pytest.param(system, key, id=f"{system}: {key}") for system, one in TABLES.items() for key in vars(one)[part]
    ]


def reader_of(one: KeyTable, key: str) -> str:
    """A method for which the key has a setting."""
    row = one.mapped[key]
    targets = {"sft": row} if isinstance(row, str) else row
    for name in [*targets, *ALGORITHMS]:
        ours = targets.get(name, row if isinstance(row, str) else "")
        if ours in {leaf.key for leaf in [*leaves(Settings()), *leaves(ALGORITHMS[name], "algorithm.")]}:
            return name
    raise AssertionError(key)


@pytest.mark.parametrize(("file", "method"), EXPECTED)
def test_a_whole_file_is_the_recipe_that_was_worked_out_by_hand(file: str, method: str) -> None:
    assert opened(read(FILES / file), method).recipe == EXPECTED[file, method]


@pytest.mark.parametrize("file", ZERO)
def test_common_configurations_of_deepspeed_go_over_a_recipe(file: str) -> None:
    recipe = {"seed": 1, "runtime": {"kind": "ray", "num_training_workers": 2}}
    assert opened(recipe, "sft", FILES / file).recipe == {"seed": 1} | ZERO[file]
    assert recipe == {"seed": 1, "runtime": {"kind": "ray", "num_training_workers": 2}}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_conf_is_the_same_as_yaml_and_as_json(tmp_path: Path, suffix: str) -> None:
    import json

    content = read(FILES / "reward.conf")
    text = json.dumps(content) if suffix == "json" else yaml.safe_dump(content)
    for name in (f"reward.{suffix}", "reward.conf" if suffix == "json" else "reward.yml"):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) == content


@pytest.mark.parametrize(("file", "method"), EXPECTED)
def test_a_printed_recipe_gives_the_same_settings(
    file: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pairs_a.jsonl", "pairs_b.jsonl"):
        Path(name).write_text("{}")
    found = opened(read(FILES / file), method)
    Path("ours.yaml").write_text(found.text(method))
    ours = load_settings("ours.yaml", ["model.lora.rank=0"])
    assert ours == load_settings(FILES / file, ["model.lora.rank=0"], method=method)
    assert found.recipe.items() <= read("ours.yaml").items()


@pytest.mark.parametrize(("system", "key"), rows("refused"))
def test_every_refusal_names_its_key_and_the_reason(system: str, key: str) -> None:
    why, free = TABLES[system].refused[key]
    with pytest.raises(SettingsError) as raised:
        READ[system](given_by(system, {key: "something else"}), "sft")
    assert f"  - {key}=something else: {why}" in str(raised.value).splitlines()
    for value in free:
        READ[system](given_by(system, {key: value}), "sft")


@pytest.mark.parametrize(("system", "key"), rows("ignored"))
def test_every_ignored_key_is_told_with_the_reason(system: str, key: str) -> None:
    found = READ[system](given_by(system, {key: 1}), "sft")
    assert f"ignored: {key} ({TABLES[system].ignored[key]})" in found.notes
    assert found.recipe == READ[system]({}, "sft").recipe


@pytest.mark.parametrize(("system", "key"), rows("mapped"))
def test_every_mapped_key_sets_ours(system: str, key: str) -> None:
    one = TABLES[system]
    method = reader_of(one, key)
    row = one.mapped[key]
    ours = row if isinstance(row, str) else row[method]
    known = {leaf.key: leaf for leaf in [*leaves(Settings()), *leaves(ALGORITHMS[method], "algorithm.")]}
    value = next(one for one in SAMPLES if replace(known[ours], value=one).complaint() is None)
    once = {"num_ppo_epochs": 1} if method == "online-dpo" and system == "async_rlhf" else {}
    recipe: Any = READ[system](given_by(system, {key: value} | once), method).recipe
    for part in ours.split("."):
        recipe = recipe[part]
    assert recipe == value


@pytest.mark.parametrize("system", TABLES)
def test_every_setting_that_a_table_names_is_there(system: str) -> None:
    known = {leaf.key for leaf in leaves(Settings())}
    known |= {leaf.key for method in ALGORITHMS.values() for leaf in leaves(method, "algorithm.")}
    named = {ours for key in TABLES[system].known for ours in TABLES[system].ours(key)}
    assert named <= known
    assert len(named) > 13


def test_every_field_of_trl_is_a_row() -> None:
    names = yaml.safe_load((FILES / "trl_fields.yaml").read_text())
    assert sum(map(len, names.values())) > 300
    assert {name for fields in names.values() for name in fields} <= set(TABLES["trl"].known)


@pytest.mark.parametrize(
    ("method", "given", "algorithm"),
    [
        ("simpo", {"loss_type": "simpo"}, SimPO(beta=0.1, target_margin=0.5, likelihood_weight=1.0)),
        ("orpo", {"beta": 0.2}, ORPO(odds_weight=0.2)),
    ],
)
def test_what_a_file_of_trl_leaves_out_is_trls_default(
    method: str, given: dict[str, Any], algorithm: Any, tmp_path: Path
) -> None:
    file = tmp_path / "trl.yaml"
    common = {"model_name_or_path": "owner/model", "dataset_name": "a/b", "output_dir": "out/run"}
    file.write_text(yaml.safe_dump(common | given), encoding="utf-8")
    settings = load_settings(file, method=method)
    assert settings.algorithm == algorithm
    assert (settings.optimizer.learning_rate, settings.data.max_tokens) == (1e-6, 1024)


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        ("trl", {"learning_rat": 1}, "learning_rat is .*TRL; .* learning_rate"),
        ("async_rlhf", {"rloo": 4}, "rloo is .*async_rlhf; .* rloo_k"),
        ("llm_on_ray", {"General": {"base_modle": "x"}}, "mean General.base_model"),
        ("llm_on_ray", {"Generol": {}, "Dataset": None}, "Generol is .*LLM-on-Ray"),
        ("llm_on_ray", {"Training": 3}, "Training=3 "),
        ("deepspeed", {"zero_optimization": {"stag": 2}}, "mean zero_optimization.stage"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(system: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        READ[system](given, "sft")


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("sft", {"learning_rate": "fast"}, "learning_rate=fast must be a number"),
        ("sft", {"learning_rate": -1.0}, "learning_rate=-1.0 must be above 0"),
        ("sft", {"bf16": "yes"}, "bf16=yes must be true or false"),
        ("sft", {"fp16": True}, "fp16=true:"),
        ("sft", {"dtype": "float16"}, "dtype=float16:"),
        ("sft", {"beta": 0.1}, "beta=0.1:"),
        ("sft", {"optim": "adafactor"}, "optim=adafactor:"),
        ("sft", {"lr_scheduler_type": "polynomial"}, "lr_scheduler_type=polynomial:"),
        ("sft", {"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs="),
        ("sft", {"truncation_mode": "keep_end"}, "truncation_mode=keep_end:"),
        ("sft", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy=wrapped:"),
        ("sft", {"loss_type": "dft"}, "loss_type=dft:"),
        ("sft", {"save_strategy": "best"}, "save_strategy=best:"),
        ("sft", {"save_steps": -0.3}, "save_steps=-0.3:"),
        ("sft", {"resume_from_checkpoint": "x"}, "resume_from_checkpoint=x:"),
        ("sft", {"use_peft": True, "lora_dropout": 0.1}, "lora_dropout=0.1:"),
        ("sft", {"use_peft": True, "lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save="),
        ("sft", {"accelerate_config": "my.yaml"}, "accelerate_config=my.yaml:"),
        ("sft", {"fsdp": "hybrid_shard"}, "fsdp=hybrid_shard:"),
        ("sft", {"fsdp": "offload"}, "fsdp=offload:"),
        ("sft", {"ddp_backend": "mpi"}, "ddp_backend=mpi:"),
        ("sft", {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy=group_by_length:"),
        ("sft", {"dataset_name": "a/b", "dataset_streaming": True}, "max_steps is missing"),
        ("sft", {"datasets": ["a"]}, "datasets="),
        ("sft", {"datasets": [{"path": "a", "pth": 1}]}, "datasets.0.pth is no key"),
        ("sft", {"datasets": [{"path": "json"}]}, "datasets.0.data_files=null:"),
        ("sft", {"datasets": [{"path": "a", "split": "x"}, {"path": "b"}]}, "datasets name the splits train, x:"),
        ("sft", {"datasets": [{"path": "a", "columns": ["x"]}]}, "datasets.0.columns=['x']:"),
        ("sft", {"datasets": [{"path": "a", "fraction": 0.5}, {"path": "b"}]}, "datasets.1.fraction=null:"),
        ("sft", {"datasets": [{"path": "a", "fraction": 1}] * 2}, "datasets.1: a is listed twice"),
        ("sft", {"load_best_model_at_end": True, "metric_for_best_model": "bleu"}, "metric_for_best_model=bleu:"),
        ("sft", {"load_best_model_at_end": True, "greater_is_better": True}, "greater_is_better=true:"),
        ("sft", {"env": {"PYTHONPATH": "."}}, "env.PYTHONPATH "),
        ("sft", {"env": 3}, "env=3 must be a section of environment variables"),
        ("sft", {"deepspeed": {"fp16": {"enabled": True}}}, "deepspeed: fp16.enabled=true: float16 needs loss scaling"),
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "loss_type="),
        ("simpo", {"loss_type": "ipo"}, "loss_type=ipo:"),
        ("simpo", {"loss_type": "simpo", "alpha": 0.1}, "alpha=0.1:"),
        ("dpo", {"sync_ref_model": True}, "ref_model_sync_steps=null:"),
        ("grpo", {"loss_type": "sapo"}, "loss_type=sapo:"),
        ("grpo", {"loss_type": "cispo"}, "epsilon_high=null:"),
        ("grpo", {"importance_sampling_level": "word"}, "importance_sampling_level=word:"),
        ("grpo", {"scale_rewards": "batch"}, "scale_rewards=batch:"),
        ("grpo", {"loss_type": "grpo", "entropy_coef": 0.1}, "entropy_coef=0.1:"),
        ("grpo", {"num_generations": 5}, "num_generations=5:"),
        ("grpo", {"max_steps": 7, "num_iterations": 2}, "max_steps=7:"),
        ("grpo", {"reward_funcs": ["reasoning_accuracy_reward"]}, "reward_funcs: reasoning_accuracy_reward "),
        ("grpo", {"reward_weights": [1.0]}, "reward_weights=[1.0]:"),
        ("grpo", {"use_vllm": True, "vllm_mode": "server"}, "vllm_mode=server:"),
        ("rloo", {"reward_clip_range": [-1.0, 2.0]}, "reward_clip_range="),
        ("online-dpo", {"rloo_k": 2}, "num_ppo_epochs=4:"),
        ("rloo", {"rloo_k": 3}, "rloo_k=3:"),
        ("rloo", {"rloo_k": 2, "stop_token": "period"}, "stop_token=period:"),
    ],
)
def test_what_trl_asks_for_and_is_not_here_is_refused_by_name(method: str, given: dict[str, Any], message: str) -> None:
    file = {"model_name_or_path": "owner/model"} | given
    with pytest.raises(SettingsError) as raised:
        opened(file, method)
    assert says(raised.value, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"Training.optimizer": "SGD"}, "Training.optimizer=SGD:"),
        ({"Training.lr_scheduler": "polynomial"}, "Training.lr_scheduler=polynomial:"),
        ({"Training.mixed_precision": "fp8"}, "Training.mixed_precision=fp8:"),
        ({"Training.device": "HPU"}, "Training.device=HPU:"),
        ({"Training.accelerate_mode": "TPU"}, "Training.accelerate_mode=TPU:"),
        (
            {"General.lora_config.r": 8, "General.lora_config.lora_dropout": 0.1},
            "General.lora_config.lora_dropout=0.1:",
        ),
        ({"General.resume_from_checkpoint": "x"}, "General.resume_from_checkpoint=x:"),
        ({"Training.kl_coeff": 0.1}, "Training.kl_coeff=0.1:"),
        ({"Dataset.validation_split_percentage": True}, "Dataset.validation_split_percentage=true:"),
        (
            {"Training.accelerate_mode": "DEEPSPEED", "Training.deepspeed_config_file": "no.json"},
            "no recipe no.json",
        ),
    ],
)
def test_what_llm_on_ray_asks_for_and_is_not_here_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        llm_on_ray.recipe(placed(given), "sft")
    assert says(raised.value, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fp16.enabled": True}, "fp16.enabled=true:"),
        ({"zero_optimization.stage": 4}, "zero_optimization.stage=4:"),
        (
            {"zero_optimization.offload_param.device": "nvme", "zero_optimization.stage": 3},
            "zero_optimization.offload_param.device=nvme:",
        ),
        (
            {"zero_optimization.offload_param.device": "cpu", "zero_optimization.stage": 2},
            "zero_optimization.offload_param.device=cpu:",
        ),
        (
            {"zero_optimization.mics_shard_size": 2, "zero_optimization.stage": 3},
            "mics_shard_size=2: .. runtime.num_training_workers=1",
        ),
        ({"optimizer.type": "OneBitAdam"}, "optimizer.type=OneBitAdam:"),
        ({"optimizer.params.adam_w_mode": False}, "optimizer.params.adam_w_mode=false:"),
        ({"scheduler.type": "OneCycle"}, "scheduler.type=OneCycle:"),
        ({"scheduler.type": "WarmupLR", "scheduler.params.warmup_type": "log"}, "scheduler.params.warmup_type=log:"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "train_batch_size=9:",
        ),
    ],
)
def test_what_deepspeed_asks_for_and_is_not_here_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        deepspeed.recipe(placed(given), "sft", {})
    assert says(raised.value, message)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"stage": 0}, {}),
        ({"stage": 1}, {"kind": "ray", "strategy": "zero1"}),
        ({"stage": 2, "cpu_offload": True}, {"kind": "ray", "strategy": "zero2", "offload": ["optimizer"]}),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            {"kind": "ray", "strategy": "fsdp", "offload": ["optimizer"]},
        ),
        (
            {"stage": 3, "mics_shard_size": 4},
            {"kind": "ray", "strategy": "fsdp", "num_training_workers": 4, "mesh": {"replicas": 2}},
        ),
        ({"stage": 3, "mics_shard_size": 8}, {"kind": "ray", "strategy": "fsdp"}),
    ],
)
def test_stages_of_zero_are_strategies_of_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    base = {"runtime": {"num_training_workers": 8}}
    assert deepspeed.recipe({"zero_optimization": given}, "sft", base).recipe.get("runtime", {}) == ours


def test_all_problems_of_a_file_are_told_at_once() -> None:
    given = {"Generol": {}, "General": {"deltatuner_config": {"algo": "lora"}}, "Training": {"optimizer": "SGD"}}
    with pytest.raises(SettingsError) as raised:
        llm_on_ray.recipe(given, "sft")
    named = [line.split("=")[0].split(" is ")[0] for line in str(raised.value).splitlines()[1:]]
    assert named == ["  - Generol", "  - General.deltatuner_config", "  - Training.optimizer"]


def test_a_file_of_trl_takes_a_configuration_of_deepspeed() -> None:
    file = {"model_name_or_path": "owner/model", "num_processes": 2, "deepspeed": str(FILES / "zero2_offload.json")}
    found = opened(file, "sft")
    assert found.recipe["train"]["batch_size"] == 16
    assert found.recipe["runtime"] == ZERO2_OFFLOADED | {"resources_per_worker": {"GPU": 1}}
    assert found.recipe == opened({**file, "deepspeed": None}, "sft", FILES / "zero2_offload.json").recipe


def test_a_tracker_of_llm_on_ray_is_ignored_with_a_line() -> None:
    found = llm_on_ray.recipe(placed({"General.report_to": "wandb"}), "sft")
    assert "log" not in found.recipe
    assert any(note.startswith("ignored: wandb of General.report_to") for note in found.notes)


def test_a_file_of_llm_on_ray_takes_a_configuration_of_deepspeed() -> None:
    given = read(FILES / "finetune.yaml")
    given["Training"] |= {"accelerate_mode": "DEEPSPEED", "deepspeed_config_file": str(FILES / "zero3_offload.json")}
    found = opened(given, "sft").recipe
    assert (found["runtime"]["strategy"], found["runtime"]["offload"]) == ("fsdp", ["weights"])
    assert found["train"]["batch_size"] == 64


def test_fractions_of_data_sets_are_shares_of_an_epoch() -> None:
    files = {"path": "json", "data_files": "b.jsonl", "fraction": 0.25}
    file = {"datasets": [{"path": "owner/a", "name": "main", "fraction": 3}, files], "test_split_size": 0.07}
    found = opened(file, "sft").recipe["data"]
    assert found["train"] == {"owner/a:main": 3, "b.jsonl": 0.25}
    assert found["validation"] == "7%"
    files["data_files"] = ["b.jsonl", "c.jsonl"]
    with pytest.raises(SettingsError, match=r"datasets\.\d\.fraction="):
        opened(file, "sft")


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_vllm_is_corrected_for_as_in_trl(mode: str) -> None:
    file = {"use_vllm": True, "vllm_importance_sampling_mode": mode}
    found = trl.recipe(file, "grpo").recipe["algorithm"]
    assert (found["correction"], found["correction_cap"]) == (mode, 3.0)
    off = trl.recipe(file | {"vllm_importance_sampling_correction": False}, "grpo").recipe["algorithm"]
    assert off["correction"] == "none"


@pytest.mark.parametrize("sampler", [{}, {"use_vllm": True}])
def test_cispo_bounds_the_ratio_by_epsilon_high(sampler: dict[str, Any]) -> None:
    """It is to what sampled, so the correction for vLLM is part of it."""
    file = {"loss_type": "cispo", "epsilon_high": 5.0} | sampler
    found = trl.recipe(file, "grpo").recipe["algorithm"]
    assert (found["correction"], found["correction_cap"], found["aggregation"]) == ("cispo", 5.0, "token")
    assert "clip" not in found


def test_variables_of_the_file_are_set_and_their_values_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAUDIT_TEST_TOKEN", raising=False)
    file = {"model_name_or_path": "a/b", "dataset_name": "a/b", "env": {"PLAUDIT_TEST_TOKEN": "secret", "N": 2}}
    assert "secret" not in opened(file, "sft").text("sft")
    assert "# export PLAUDIT_TEST_TOKEN=... (from env)\n" in opened(file, "sft").text("sft")
    assert "PLAUDIT_TEST_TOKEN" not in os.environ
    try:
        load_settings(file, method="sft")
        assert (os.environ.pop("PLAUDIT_TEST_TOKEN"), os.environ.pop("N")) == ("secret", "2")
    finally:
        os.environ.pop("PLAUDIT_TEST_TOKEN", None)


def test_our_own_recipes_are_left_as_they_are() -> None:
    given = {"method": "sft", "model": {"path": "a"}, "seed": 3}
    assert opened(given, None).recipe == given
    assert opened({"learning_rate": 1e-4}, None).recipe == {"learning_rate": 1e-4}
    with pytest.raises(SettingsError, match="method, model"):
        opened(given | {"dataset_name": "x"}, "sft")
    with pytest.raises(SettingsError, match="plaudit METHOD FILE"):
        opened({"dataset_name": "x"}, None)
    with pytest.raises(SettingsError, match=r"'sfft'.* sft"):
        opened({"dataset_name": "x"}, "sfft")


@pytest.mark.parametrize("text", ["{", "[1]", "print('x')", "{'a': open('x')}", ""])
def test_a_conf_that_is_no_literal_is_refused_and_never_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.conf").write_text(text)
    with pytest.raises(SettingsError, match=r"x\.conf (.*read|.*list)"):
        read(tmp_path / "x.conf")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2000),
    st.floats(),
    st.sampled_from(["", "no", "auto", "steps", "epoch", "bf16", "x/y"]),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["path", "min_lr_rate", "a"]), st.integers(0, 3), max_size=2),
)


@pytest.mark.parametrize("system", TABLES)
@given(data=st.data())
def test_any_values_give_a_recipe_that_reads_back_or_an_error_for_people(system: str, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    keys = data.draw(st.lists(st.sampled_from(TABLES[system].known), max_size=5, unique=True))
    values = {key: data.draw(VALUES) for key in keys}
    try:
        found = READ[system](given_by(system, values), method)
    except SettingsError as error:
        assert str(error)
        return
    again = yaml.safe_load(found.text(method))
    assert again.pop("method") == method
    assert again == found.recipe


@pytest.mark.parametrize(
    ("method", "given", "warmup"),
    [
        ("sft", {"warmup_steps": 100}, "100 steps"),
        ("sft", {"warmup_steps": 0.2}, 0.2),
        ("sft", {"warmup_ratio": 0.1}, 0.1),
        ("grpo", {"warmup_steps": 100, "num_iterations": 4}, "25 steps"),  # updates there, steps of 4 updates here
    ],
)
def test_trls_warm_up_is_a_number_of_updates_or_a_share_of_them(method: str, given: Any, warmup: Any) -> None:
    assert trl.recipe(given, method).recipe["optimizer"]["warmup"] == warmup


def test_deepspeeds_warm_up_is_a_number_of_steps() -> None:
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    assert deepspeed.recipe(config, "sft", {}).recipe["optimizer"]["warmup"] == "9 steps"
