"""Read DeepSpeed's configuration (`--deepspeed ds_config.json`), which overrides a recipe.

ZeRO's stages become FSDP2, which gathers and sums as often as they do. Keys without an equivalent are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.importers.table import Found, Translation, Work, flat, imported, table, translate
from plaudit.settings.files import read
from plaudit.settings.imported import Imported
from plaudit.support.fields import shown

STAGES = {1: "zero1", 2: "zero2", 3: "fsdp"}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
AUTO = "auto"


def recipe(tree: Mapping[str, Any], method: str, base: Mapping[str, Any]) -> Imported:
    """Turn a configuration into a recipe of `plaudit METHOD`, to be merged over the recipe `base`. Raises SettingsError
    with everything that cannot be used."""
    runtime = base.get("runtime")
    workers = runtime.get("num_training_workers", 1) if isinstance(runtime, Mapping) else 1
    return imported(_reading(tree, method, workers if isinstance(workers, int) else 1), WORK)


def settings(config: Any, outer: Translation) -> Found:
    """Yield the settings of the DeepSpeed configuration that another system's file names or contains."""
    tree = read(config) if isinstance(config, str) else config
    if not isinstance(tree, Mapping):
        outer.problems.append(f"deepspeed={shown(config)}: give the name of a file or a section")
        return
    reading = _reading(tree, outer.method, outer.workers, outer.updates)
    translate(reading, WORK)
    outer.problems += [f"deepspeed: {problem}" for problem in reading.problems]
    outer.notes += [f"deepspeed: {note}" for note in reading.notes]
    yield from reading.found.items()


def _reading(tree: Mapping[str, Any], method: str, workers: int, updates: int = 1) -> Translation:
    read = table("DeepSpeed", "deepspeed")
    values = {key: value for key, value in flat(tree, read.known).items() if value != AUTO}
    return Translation(table=read, method=method, foreign=values, workers=workers, updates=updates)


def batch(r: Translation) -> Found:
    from plaudit.algorithms import ALGORITHMS

    whole, part, passes = r("train_batch_size"), r("train_micro_batch_size_per_gpu"), r("gradient_accumulation_steps")
    product = None if part is None else part * (passes or 1) * r.workers
    if whole is not None and product is not None and passes is not None and product != whole:
        r.refuse("train_batch_size", f"{part} rows x {passes} passes x {r.workers} ranks are {product}: correct one")
    if whole is None and passes is None:
        return
    size = product if whole is None else whole
    if size is not None and ALGORITHMS[r.method]().online:
        r.notes.append(f"a step has rollout.prompts_per_step prompts with their answers, not {size} rows")
    elif size is not None:
        yield "train.batch_size", size


def precision(r: Translation) -> Found:
    if r("fp16.enabled"):
        r.refuse("fp16.enabled", "float16 needs loss scaling, which is not supported: use bf16")
    if (low := r("bf16.enabled", r("bfloat16.enabled"))) is not None:
        yield "learn.precision", "bfloat16" if low else "float32"


def scheduler(r: Translation) -> Found:
    if (named := r("scheduler.type")) is None:
        return
    if named not in SCHEDULERS:
        r.refuse("scheduler.type", f"it must be one of {', '.join(SCHEDULERS)}")
        return
    yield "optimizer.schedule", SCHEDULERS[named]
    if (rate := r("scheduler.params.warmup_max_lr")) is not None:
        yield "optimizer.learning_rate", rate
    if (least := r("scheduler.params.cos_min_ratio")) is not None:
        yield "optimizer.min_ratio", least
    if r("scheduler.params.warmup_type", "linear") != "linear":
        r.refuse("scheduler.params.warmup_type", "the learning rate rises linearly: set it to linear")
    steps, total = r("scheduler.params.warmup_num_steps", 0), r("scheduler.params.total_num_steps", 0)
    if steps:
        yield "optimizer.warmup", steps / total if total > steps else f"{max(round(steps / r.updates), 1)} steps"
        if "scheduler.params.warmup_type" not in r.foreign:
            r.notes.append("the learning rate rises linearly; DeepSpeed's default is logarithmic (warmup_type)")


def sharding(r: Translation) -> Found:
    """Turn ZeRO 1 to 3 into FSDP2 over the recipe's ranks, and MiCS into replicas of shards."""
    stage = r("zero_optimization.stage", 0)
    places = {part: r(f"zero_optimization.offload_{part}.device", "none") for part in ("optimizer", "param")}
    for part, place in places.items():
        if place not in ("none", "cpu"):
            r.refuse(f"zero_optimization.offload_{part}.device", "shards are on GPUs (none) or in host memory (cpu)")
    if stage not in range(4):
        r.refuse("zero_optimization.stage", "it must be 0, 1, 2 or 3")
    if stage not in STAGES:
        return
    if places["param"] == "cpu" and stage < 3:
        r.refuse("zero_optimization.offload_param.device", "weights are offloaded only in stage 3")
    yield from {"runtime.kind": "ray", "runtime.strategy": STAGES[stage]}.items()
    if places["param"] == "cpu":
        yield "runtime.offload", ["weights"]
        if places["optimizer"] != "cpu":
            r.notes.append("the moments of offloaded weights are offloaded too (runtime.offload)")
    elif places["optimizer"] == "cpu" or r("zero_optimization.cpu_offload"):
        yield "runtime.offload", ["optimizer"]
    yield from _replicas(r)


def _replicas(r: Translation) -> Found:
    part = r("zero_optimization.mics_shard_size", -1)
    if r.workers == 1:
        r.notes.append("the file does not say the number of ranks: set runtime.num_training_workers")
    if part not in (-1, r.workers) and (part < 2 or r.workers % part):
        key = "zero_optimization.mics_shard_size"
        r.refuse(key, f"it must be at least 2 and divide runtime.num_training_workers={r.workers} of the recipe")
    elif part not in (-1, r.workers):
        yield from {"runtime.num_training_workers": part, "runtime.mesh": {"replicas": r.workers // part}}.items()


def tracker(r: Translation) -> Found:
    asked = {"wandb": r("wandb.project", "deepspeed"), "tensorboard": "tensorboard"}
    if found := {name: project for name, project in asked.items() if r(f"{name}.enabled")}:
        yield "log.trackers", found


WORK: Mapping[str, Work] = {work.__name__: work for work in (batch, precision, scheduler, sharding, tracker)}
