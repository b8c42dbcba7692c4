"""Read configuration files of LLM-on-Ray: `General`, `Dataset` and `Training`. `llm_on_ray.yaml` has every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from plaudit.importers import deepspeed
from plaudit.importers.schedules import scheduled, spaced
from plaudit.importers.sources import set_aside
from plaudit.importers.table import Found, Translation, Work, flat, imported, table
from plaudit.settings.imported import Imported

TELLING = {"General", "Dataset", "Training"}
"""Sections by which a file of LLM-on-Ray is recognised; one suffices."""
DEVICES = {"cpu": "cpu", "gpu": "cuda"}
MODES = {"ddp": "replicate", "fsdp": "fsdp", "deepspeed": "replicate"}
"""Their mode -> runtime.strategy. In mode deepspeed its own configuration may set another strategy."""


def recipe(tree: Mapping[str, Any], method: str) -> Imported:
    """Turn such a file into a recipe of `plaudit METHOD`. Raises SettingsError with everything that cannot be used."""
    read = table("LLM-on-Ray", "llm_on_ray")
    reading = Translation(table=read, method=method, foreign=flat(tree, read.known))
    reading.workers = reading("Training.num_training_workers", 1)
    return imported(reading, WORK)


def folder(r: Translation) -> Found:
    """Use checkpoint_dir as the run's folder, since files of later stages name it as their model."""
    path = r("General.checkpoint_dir", r("General.output_dir"))
    if path is not None:
        yield from {"output": str(PurePath(path).parent), "name": PurePath(path).name}.items()
    if "General.checkpoint_dir" in r.foreign and "General.output_dir" in r.foreign:
        r.notes.append(
            f"the run's folder is General.checkpoint_dir={path}; it also holds what goes to General.output_dir"
        )


def models(r: Translation) -> Found:
    """Prefer the pretrained folder, which has its own tokenizer, to the base model's name."""
    path = r("General.model_pretrain", r("General.base_model", r("General.model_name")))
    if path is not None:
        yield "model.path", path
    judge = r("General.rm_pretrain", r("General.rm_name"))
    if judge is not None:
        yield "rewards", [{"kind": "judge", "path": judge}]


def adapters(r: Translation) -> Found:
    if "General.lora_config.r" not in r.foreign:
        return
    if r("General.lora_config.lora_dropout", 0):
        r.refuse("General.lora_config.lora_dropout", "adapters have no dropout here: set it to 0")
    yield "model.lora.rank", r("General.lora_config.r")
    yield "model.lora.alpha", r("General.lora_config.lora_alpha", 8.0)
    if targets := r("General.lora_config.target_modules"):
        yield "model.lora.targets", targets
    else:
        r.notes.append("all linear layers get adapters; peft's default for Llama is target_modules: [q_proj, v_proj]")


def validation(r: Translation) -> Found:
    share = r("Dataset.validation_split_percentage", 0)
    if share and "Dataset.validation_file" not in r.foreign:
        yield from set_aside(r, "Dataset.validation_split_percentage", share)


def lengths(r: Translation) -> Found:
    if (most := r("Dataset.max_length", r("Dataset.max_seq_length"))) is not None:
        yield "data.max_tokens", most
        if "Dataset.max_source_length" not in r.foreign:
            yield "data.max_prompt_tokens", max(most - 1, 1)


def steps(r: Translation) -> Found:
    if (prompts := r("Training.experience_batch_size")) is not None:
        yield "rollout.prompts_per_step", prompts
        yield "algorithm.minibatches", 1
    if (size := r("Training.batch_size")) is not None:
        yield "train.batch_size", size * r("Training.gradient_accumulation_steps") * r.workers
    number = r("Training.max_train_steps", r("Training.training_iteration"))
    yield ("train.epochs", float(r("Training.epochs"))) if number is None else ("train.steps", number)


def critic(r: Translation) -> Found:
    if r.method == "ppo" and "Training.learning_rate" in r.foreign:
        yield "critic.learning_rate", r("Training.learning_rate")


def schedule(r: Translation) -> Found:
    yield from scheduled(r, "Training.lr_scheduler", r("Training.lr_scheduler", "linear"), 0.0)


def optimizer(r: Translation) -> Found:
    if r("Training.optimizer", "AdamW").lower() not in ("adamw", "adamw_torch"):
        r.refuse("Training.optimizer", "only AdamW is supported")
    yield "optimizer.betas", [0.9, 0.999]


def precision(r: Translation) -> Found:
    if (how := str(r("Training.mixed_precision", "no")).lower()) not in ("no", "false", "bf16"):
        r.refuse(
            "Training.mixed_precision", "it must be no or bf16; float16 needs loss scaling, which is not supported"
        )
    yield "learn.precision", "bfloat16" if how == "bf16" else "float32"


def processes(r: Translation) -> Found:
    if (device := r("Training.device")) is not None:
        if device.lower() not in DEVICES:
            r.refuse("Training.device", "it must be CPU or GPU (NVIDIA)")
        yield "device", DEVICES.get(device.lower(), "auto")
    if "Training.num_training_workers" in r.foreign or "Training.resources_per_worker" in r.foreign:
        yield from {"runtime.kind": "ray", "runtime.num_training_workers": r.workers}.items()
    mode = r("Training.accelerate_mode", "DDP").lower().removeprefix("cpu_").removeprefix("gpu_")
    if mode not in MODES:
        r.refuse("Training.accelerate_mode", "it must be DDP, FSDP or DEEPSPEED")
    elif MODES[mode] == "fsdp":
        yield "runtime.strategy", "fsdp"
    if mode == "deepspeed" and (config := r("Training.deepspeed_config_file")):
        yield from deepspeed.settings(config, r)


def checkpoints(r: Translation) -> Found:
    if "General.save_strategy" in r.foreign:
        yield from spaced(r, "save", "General.save_strategy", "", otherwise=500)
    if (resume := r("General.resume_from_checkpoint")) is True:
        yield "resume", "latest"
    elif resume not in (None, False):
        r.refuse(
            "General.resume_from_checkpoint", "true continues this run; to start from other weights set base_model"
        )


def records(r: Translation) -> Found:
    if (tracker := r("General.report_to", "none")) not in ("none", "no", "tensorboard"):
        r.notes.append(f"ignored: {tracker} of General.report_to (set log.trackers)")
    if tracker == "tensorboard":
        yield "log.trackers", {"tensorboard": "tensorboard"}


WORK: Mapping[str, Work] = {
    work.__name__: work
    for work in (
        *(folder, models, adapters, validation, lengths, steps, critic, schedule, optimizer, precision, processes),
        *(checkpoints, records),
    )
}
