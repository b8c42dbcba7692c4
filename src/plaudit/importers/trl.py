"""Read TRL's YAML (`trl sft --config`). `trl.yaml` maps its keys; functions here convert keys that belong together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from plaudit.importers import deepspeed
from plaudit.importers.schedules import scheduled, spaced
from plaudit.importers.sources import reward_entries, sources
from plaudit.importers.table import Found, KeyTable, Translation, Work, imported, table
from plaudit.monitor.settings import TRACKERS
from plaudit.settings.imported import Imported
from plaudit.support.fields import shown

TELLING = {"model_name_or_path", "dataset_name", "datasets", "dataset_mixture", "per_device_train_batch_size"}
"""Keys by which a file of TRL is recognised; one suffices."""
LATE = {"PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"}
LATE |= {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"}
"""Environment variables that a process reads at its start, so that a file read later cannot set them."""
ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"}
ADAMW |= {"paged_adamw", "paged_adamw_32bit"}  # same arithmetic; they also move moments to host memory if a GPU is full
SHARDED = {"zero1": "zero1", "zero2": "zero2", "zero3": "fsdp", "fsdp1": "fsdp", "fsdp2": "fsdp"}
WHOLE = {"multi_gpu": "replicate", "single_gpu": "replicate"}
PROCESSES = 8
"""Number of processes in TRL's own accelerate_config files, except single_gpu."""
PAIRWISE = {"sigmoid": {}, "hinge": {}, "robust": {}, "ipo": {"algorithm.length_average": True}}
GROUPED = ("dapo", "grpo", "dr_grpo", "cispo")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def recipe(tree: Mapping[str, Any], method: str) -> Imported:
    """Turn such a file into a recipe of `plaudit METHOD`. Raises SettingsError with everything that cannot be used."""
    return imported(reading(table("TRL", "trl"), tree, method), WORK)


def reading(read: KeyTable, tree: Mapping[str, Any], method: str) -> Translation:
    """Return a `Translation` of a flat file, which may have a section `env` with environment variables."""
    values = {key: value for key, value in tree.items() if value is not None}
    environment = values.pop("env", {})
    found = Translation(table=read, method=method, foreign=values)
    _variables(found, environment)
    return found


def _variables(reading: Translation, env: Any) -> None:
    if not isinstance(env, Mapping):
        reading.problems.append(f"env={shown(env)} must be a section of environment variables")
        return
    late = sorted(LATE & set(env))
    reading.problems += [f"env.{name} is read when the process starts: export it in the shell instead" for name in late]
    reading.environment = {str(name): str(value) for name, value in env.items()}


def folder(r: Translation) -> Found:
    if (path := r("output_dir")) is not None:
        place = PurePath(r("output_global_parent_dir", "")) / path
        yield from {"output": str(place.parent), "name": place.name}.items()


def processes_of(r: Translation) -> int:
    """Return the number of training processes that the file asks for."""
    default = PROCESSES if r("accelerate_config") in {*SHARDED, *WHOLE} - {"single_gpu"} else 1
    return int(r("num_processes", default))


def of_a_step(r: Translation) -> int:
    """Return the number of rows of one optimizer step."""
    size = r("per_device_train_batch_size") * r("gradient_accumulation_steps", 1) * processes_of(r)
    if "num_processes" not in r.foreign and "accelerate_config" not in r.foreign:
        r.notes.append("the batch is that of one device; for N devices multiply it by N")
    return int(size)


def length(r: Translation) -> Found:
    if (steps := r("max_steps", -1)) > 0:
        yield "train.steps", divided(r, "max_steps", steps, r.updates)
    else:
        yield "train.epochs", float(r("num_train_epochs"))


def divided(r: Translation, key: str, number: int, by: int) -> int:
    if by < 1 or number % by:
        r.refuse(key, f"{number} must be a multiple of {by} (num_processes and gradient_accumulation_steps raise it)")
    return max(number // max(by, 1), 1)


def _online(r: Translation) -> bool:
    from plaudit.algorithms import ALGORITHMS

    return ALGORITHMS[r.method]().online


def steps(r: Translation) -> Found:
    """Yield the settings of rows per step and number of steps. TRL counts optimizer steps and answers; a step here
    counts prompts, and has all optimizer steps on their answers."""
    size = of_a_step(r)
    if not _online(r):
        yield "train.batch_size", size
        yield from length(r)
        return
    passes = r("gradient_accumulation_steps", 1)
    whole = r("generation_batch_size", r("steps_per_generation", passes) * size // passes)
    yield "rollout.prompts_per_step", divided(r, "num_generations", whole, r("num_generations", 1))
    minibatches = divided(r, "gradient_accumulation_steps", whole, size)
    yield "algorithm.minibatches", minibatches
    r.updates = minibatches * r("num_iterations", 1)
    yield from length(r)


def precision(r: Translation) -> Found:
    for key in ("dtype", "torch_dtype", "mixed_precision"):
        if r(key) in ("float16", "fp16"):
            r.refuse(key, "float16 needs loss scaling, which is not supported: use bfloat16 or float32")
    if r("fp16"):
        r.refuse("fp16", "float16 needs loss scaling, which is not supported: set bf16: true")
    low = "bfloat16" in (r("dtype"), r("torch_dtype")) or r("mixed_precision") == "bf16"
    yield "learn.precision", "bfloat16" if low or r("bf16", False) else "float32"


def schedule(r: Translation) -> Found:
    extra = r("lr_scheduler_kwargs") or {}
    ratio = extra.get("min_lr_rate", 0.0) if isinstance(extra, Mapping) else 0.0
    if not isinstance(extra, Mapping) or set(extra) - {"min_lr_rate"}:
        r.refuse("lr_scheduler_kwargs", "only min_lr_rate is supported (optimizer.min_ratio)")
    elif extra:
        yield "optimizer.min_ratio", float(ratio)
    steps = r("warmup_steps", 0)
    share = r("warmup_ratio", 0.0) if steps == 0 else steps
    yield from scheduled(r, "lr_scheduler_type", str(r("lr_scheduler_type", "linear")), share)


def optimizer(r: Translation) -> Found:
    if r("optim", "adamw_torch") not in ADAMW:
        r.refuse("optim", "only AdamW with moments in float32 is supported: set adamw_torch")
    yield "optimizer.betas", [r("adam_beta1", 0.9), r("adam_beta2")]


def lengths(r: Translation) -> Found:
    """Yield the limits of tokens. TRL limits only the whole row; here the prompt has a lower limit of its own."""
    prompt = r("max_prompt_length")
    if _online(r):
        if prompt is not None:
            yield "data.max_prompt_tokens", prompt
        else:
            r.notes.append("prompts longer than data.max_prompt_tokens=512 lose their beginning; TRL keeps them whole")
        return
    most = r("max_seq_length", r("max_length", 1024))
    yield "data.max_tokens", most
    yield "data.max_prompt_tokens", prompt or max(most - 1, 1)
    yield "data.overlong", "drop" if r.method == "reward" else "truncate"
    if r("truncation_mode", "keep_start") == "keep_end":
        r.refuse("truncation_mode", "answers that are too long are truncated at their end: leave this key out")


def order(r: Translation) -> Found:
    how = r("train_sampling_strategy", "random")
    if how not in ("random", "sequential"):
        r.refuse("train_sampling_strategy", "it must be random or sequential (the order of the file)")
    shuffled = how == "random" and (r("shuffle_dataset", True) or not _online(r))
    if not shuffled:
        yield "data.shuffle", False


def evaluations(r: Translation) -> Found:
    key = "evaluation_strategy" if "evaluation_strategy" in r.foreign else "eval_strategy"
    yield from spaced(r, "evaluate", key, "eval_steps", otherwise=r("logging_steps", 10))
    if r("load_best_model_at_end"):
        named = str(r("metric_for_best_model", "loss")).removeprefix("eval_")
        best = {"rewards/accuracies": "accuracy", "rewards/margins": "margin", "reward": "reward/mean"}.get(
            named, named
        )
        if best not in ("loss", "accuracy", "margin", "reward/mean"):
            r.refuse("metric_for_best_model", "it must be loss, accuracy, margin or reward")
        if r("greater_is_better", best != "loss") != (best != "loss"):
            r.refuse("greater_is_better", f"the best {best} is the {'lowest' if best == 'loss' else 'highest'}")
        yield "evaluate.best", best


def checkpoints(r: Translation) -> Found:
    if r("save_strategy") == "best":
        r.refuse("save_strategy", "set load_best_model_at_end, which keeps the best checkpoint (evaluate.best)")
    elif {"save_strategy", "save_steps"} & set(r.foreign):
        yield from spaced(r, "save", "save_strategy", "save_steps", otherwise=500, by_default="steps")
    if (most := r("save_total_limit")) is not None:
        yield "save.keep", most
    resume = r("resume_from_checkpoint", False)
    if resume is True or str(resume).lower() == "true":
        yield "resume", "latest"
    elif resume is not False and str(resume).lower() != "false":
        r.refuse(
            "resume_from_checkpoint", "true continues this run; to start from other weights set model_name_or_path"
        )


def records(r: Translation) -> Found:
    if r("logging_steps", 0) >= 1:
        yield "train.log_every", int(r("logging_steps"))
    reporters = r("report_to", "none")
    asked = {reporters} if isinstance(reporters, str) else set(reporters or ())
    if others := sorted(asked - {"none", "no", *TRACKERS, ""}):
        r.notes.append(f"ignored: {', '.join(others)} of report_to (trackers are {', '.join(TRACKERS)})")

    def named(variable: str) -> str | None:
        return r.environment.get(variable) or os.environ.get(variable)

    projects = {
        "tensorboard": "tensorboard",
        "wandb": r("project") or r("wandb_project") or named("WANDB_PROJECT") or "huggingface",
        "mlflow": named("MLFLOW_EXPERIMENT_NAME") or "Default",
        "trackio": r("project") or "huggingface",
    }
    if trackers := {name: projects[name] for name in TRACKERS if name in asked}:
        yield "log.trackers", trackers


def adapters(r: Translation) -> Found:
    if not r("use_peft"):
        return
    if "lora_dropout" not in r.foreign:
        r.notes.append("adapters have no dropout here (TRL: 0.05)")
    elif r("lora_dropout"):
        r.refuse("lora_dropout", "adapters have no dropout here: set it to 0")
    if r("lora_modules_to_save", []) not in ([], ["score"], "score"):
        r.refuse("lora_modules_to_save", "only adapters, and a judge's head, are trained: leave it out")
    rank, targets = r("lora_r", 16), r("lora_target_modules")
    yield "model.lora.rank", rank
    yield "model.lora.alpha", r("lora_alpha", 32.0) * (rank**0.5 if r("use_rslora") else 1)
    named = [targets] if isinstance(targets, str) else list(targets or [])
    yield "model.lora.targets", [] if named == ["all-linear"] else named
    if targets is None:
        r.notes.append(
            "all linear layers get adapters; peft's default for Llama is lora_target_modules: [q_proj, v_proj]"
        )


def processes(r: Translation) -> Found:
    number, config, sharded = processes_of(r), r("accelerate_config"), str(r("fsdp", "")).split()
    r.workers = number
    if config is not None and config not in SHARDED | WHOLE:
        r.refuse("accelerate_config", f"it must be one of TRL's own: {', '.join(sorted(SHARDED | WHOLE))}")
    if r("use_cpu"):
        yield "device", "cpu"
    if backend := r("ddp_backend"):
        if backend not in ("gloo", "nccl"):
            r.refuse("ddp_backend", "it must be gloo or nccl")
        yield "runtime.backend", backend
    spread = config in SHARDED or bool({"full_shard", "shard_grad_op"} & set(sharded))
    if number > 1 or spread:
        yield "runtime.kind", "ray"
        yield "runtime.num_training_workers", number
        yield "runtime.resources_per_worker", {} if r("use_cpu") else {"GPU": 1}
    if spread:
        offloaded = "offload" in sharded
        yield "runtime.strategy", SHARDED.get(config, "fsdp" if "full_shard" in sharded or offloaded else "zero2")
        if offloaded:
            yield "runtime.offload", ["weights"]
    elif "offload" in sharded:
        r.refuse("fsdp", "only shards can be offloaded: add full_shard")
    if set(sharded) - {"full_shard", "shard_grad_op", "auto_wrap", "offload"}:
        r.refuse("fsdp", "only full_shard, shard_grad_op, auto_wrap and offload are supported")
    if (config := r("deepspeed")) is not None:
        yield from deepspeed.settings(config, r)


def loss(r: Translation) -> Found:
    if r.method in ("dpo", "online-dpo", "sft", "kto", "simpo"):
        yield from plain_loss(r)
        return
    low = r("epsilon", 0.2)
    high = r("epsilon_high", low)
    if r.method == "grpo" and _loss_type(r, "dapo") == "cispo":
        if high < 1:
            r.refuse("epsilon_high", "with loss_type: cispo it bounds the ratio itself: give 1 or more, such as 5")
        yield from {"algorithm.correction": "cispo", "algorithm.correction_cap": max(float(high), 1.0)}.items()
    else:
        yield "algorithm.clip", [low, high]
    if r.method == "rloo":
        yield from {"algorithm.ratio": "sequence", "algorithm.aggregation": "sequence"}.items()
    elif r.method == "grpo":
        yield from _grouped_loss(r)


def _loss_type(r: Translation, default: str) -> str:
    losses = r("loss_type", default)
    return losses if isinstance(losses, str) else ", ".join(losses)


def plain_loss(r: Translation) -> Found:
    own = {"sft": ["nll", "chunked_nll"], "kto": ["kto"], "simpo": ["simpo"]}
    known = own.get(r.method, [*PAIRWISE])
    named = _loss_type(r, known[0])
    if named not in known:
        r.refuse("loss_type", f"it must be one of {', '.join(known)}")
    elif r.method == "sft" and not r("assistant_only_loss", False):
        r.notes.append(
            "of a chat, the last answer is trained (every answer with assistant_only_loss: true); TRL trains all tokens"
        )
    elif r.method in ("dpo", "online-dpo"):
        yield from ({"algorithm.loss": named} | PAIRWISE[named]).items()


def _grouped_loss(r: Translation) -> Found:
    kind, level, scale = _loss_type(r, "dapo"), r("importance_sampling_level", "token"), r("scale_rewards", "group")
    if kind not in GROUPED:
        r.refuse("loss_type", f"it must be one of {', '.join(GROUPED)}")
    if level not in ("token", "sequence"):
        r.refuse("importance_sampling_level", "it must be token or sequence")
    if scale not in ("group", "none", True, False):
        r.refuse("scale_rewards", "it must be group (divide by the deviation of the group) or none")
    if r("entropy_coef", 0) and kind != "dapo":
        r.refuse("entropy_coef", "TRL averages the bonus over tokens, which only loss_type: dapo does here")
    by_kind = {"grpo": "sequence", "dr_grpo": float(r("max_completion_length"))}
    yield "algorithm.aggregation", by_kind.get(kind, "token")
    yield "algorithm.ratio", "geometric" if level == "sequence" else "token"
    yield "algorithm.scale_rewards", scale in ("group", True)
    yield "algorithm.kl_estimator", "weighted_k3" if r("use_bias_correction_kl", True) else "k3"


def moving_reference(r: Translation) -> Found:
    if r("sync_ref_model"):
        if r("ref_model_sync_steps", 512) != 1:
            r.refuse(
                "ref_model_sync_steps",
                "the reference moves after every step: set 1, and a smaller ref_model_mixup_alpha",
            )
        yield "reference.ema", r("ref_model_mixup_alpha", 0.6)


def rewards(r: Translation) -> Found:
    if entries := reward_entries(r):
        yield "rewards", entries
    if clip := r("reward_clip_range"):
        if len(clip) != 2 or clip[0] != -clip[1]:
            r.refuse("reward_clip_range", "the bounds must be symmetric, such as [-5, 5]")
        yield "shaping.clip", float(clip[-1])
    if r("mask_truncated_completions"):
        yield "shaping.unfinished", "mask_loss"


def vllm(r: Translation) -> Found:
    if not r("use_vllm"):
        return
    yield "rollout.engine", "vllm"
    if r("vllm_mode", "colocate") != "colocate":
        r.refuse("vllm_mode", "a run starts its own engines (rollout.workers): set colocate")
    if r("vllm_enable_sleep_mode"):
        yield "runtime.placement", {"generate": {"shares": "train"}}
    how = r("vllm_importance_sampling_mode", "token_truncate")
    if r.method == "grpo" and _loss_type(r, "dapo") == "cispo":
        r.notes.append("loss_type: cispo bounds the ratio to what vLLM sampled, so it corrects for vLLM too")
    elif how not in CORRECTIONS:
        r.refuse("vllm_importance_sampling_mode", f"it must be one of {', '.join(CORRECTIONS)}")
    elif not r("vllm_importance_sampling_correction", True):
        yield "algorithm.correction", "none"
    else:
        yield "algorithm.correction", how
        cap = r("vllm_importance_sampling_cap", r("vllm_importance_sampling_clip_max", 2.0))
        yield "algorithm.correction_cap", float(cap)
        if how.endswith("mask"):
            r.notes.append(
                "vllm_importance_sampling_mode: samples that are not masked have weight 1; in TRL it is their ratio"
            )


def packing(r: Translation) -> Found:
    if r("packing"):
        if r("packing_strategy", "bfd") == "wrapped":
            r.refuse("packing_strategy", "rows are packed whole and never cut: set bfd")
        r.notes.append(
            "packing: a step has train.batch_size rows, but in TRL that many packs of max_length tokens: raise it"
        )
    yield from ()


WORK: Mapping[str, Work] = {
    work.__name__: work
    for work in (
        *(folder, steps, precision, schedule, optimizer, lengths, sources, order, evaluations, checkpoints, records),
        *(adapters, processes, loss, moving_reference, rewards, vllm, packing),
    )
}
